"""The messages between the storage tiers and the rest of the engine, and the handles a worker holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from daric_rag.engine.keys import KEY_BYTES, SEGMENT_TOKENS, SegmentKey, Tier

ITEM_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RecordSpec:
    """Shape and dtype of the records of one store.

    The payload of a segment is one contiguous array `[num_layers, 2, num_tokens, num_kv_heads, head_dim]` of
    `dtype`: first the keys at chunk-relative positions, then the values.
    Raises `ValueError` for anything it cannot describe.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_NBYTES:
            raise ValueError(f"RecordSpec.dtype={self.dtype!r}: allowed are {', '.join(ITEM_NBYTES)}")
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= 65535:
                raise ValueError(f"RecordSpec.{name}={value!r}: allowed is a whole number from 1 to 65535")

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * ITEM_NBYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.num_layers * self.layer_bytes_per_token

    def layer_nbytes(self, num_tokens: int) -> int:
        """Bytes of one layer of a segment; layer `i` starts at `i * layer_nbytes` in the payload."""
        return num_tokens * self.layer_bytes_per_token

    def payload_nbytes(self, num_tokens: int) -> int:
        """Bytes of a whole segment."""
        return num_tokens * self.bytes_per_token


def check_segment(key: SegmentKey, parent: SegmentKey, num_tokens: int) -> None:
    """Raise `ValueError` unless these can name a segment; a parent may be empty: nothing stands before it."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise ValueError(f"key={key!r}: allowed are {KEY_BYTES} bytes")
    if not isinstance(parent, bytes) or len(parent) not in (0, KEY_BYTES):
        raise ValueError(f"parent={parent!r}: allowed are {KEY_BYTES} bytes, or none")
    if not 1 <= num_tokens <= SEGMENT_TOKENS:
        raise ValueError(f"num_tokens={num_tokens!r}: allowed is 1 to {SEGMENT_TOKENS}")


@dataclass(frozen=True)
class StoreEvent:
    """A copy of a record appeared in a tier, or is gone from it; drained by the worker for the index."""

    kind: Literal["added", "removed"]
    key: SegmentKey
    tier: Tier


class WriteHandle:
    """Space for a record that is being saved: fill `data`, then `KVStore.commit` or `KVStore.abort`.

    `data` is `uint8[payload_nbytes]` at `address`, in the arena or beside it (page-locked only in the arena), and
    belongs to the handle: a handle dropped without either call gives its space back, so `data` must not outlive
    it.
    """

    __slots__ = ("_abandon", "address", "data", "key", "num_tokens", "record")

    def __init__(
        self, key: SegmentKey, num_tokens: int, data: Bytes, record: object, abandon: Callable[[object], None]
    ) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.data = data
        self.address = int(data.ctypes.data)
        self.record: object | None = record
        self._abandon = abandon

    def __del__(self) -> None:
        if getattr(self, "record", None) is not None:
            self._abandon(self.record)


class Arrival(Protocol):
    """The progress of a record that is still being read, layer by layer."""

    def is_ready(self, layer: int) -> bool:
        """Whether `layer` is in memory and verified."""

    def wait(self, layer: int, deadline: float | None) -> bool:
        """Block until it is; False if it will not be, or is not by `deadline` (`time.monotonic()`)."""


class ReadHandle:
    """A pinned record: `data`, `uint8[payload_nbytes]` at `address`, is valid until `KVStore.release`.

    Layer `i` may be read once `wait(i)` has returned True; nothing may be written. A handle dropped without a
    release is unpinned.
    """

    __slots__ = ("_abandon", "_arrival", "address", "data", "key", "num_tokens", "record", "tier")

    def __init__(
        self,
        key: SegmentKey,
        num_tokens: int,
        tier: Tier,
        data: Bytes,
        record: object,
        arrival: Arrival | None,
        abandon: Callable[[object], None],
    ) -> None:
        self.key = key
        self.num_tokens = num_tokens
        self.tier = tier
        self.data = data
        self.address = int(data.ctypes.data)
        self.record: object | None = record
        self._arrival = arrival
        self._abandon = abandon

    def wait(self, layer: int, deadline: float | None = None) -> bool:
        """Block until the bytes of `layer` are resident and verified; False is a miss: damaged, gone or late.

        `deadline` in seconds of `time.monotonic()`, one for as many handles as one likes; None: as long as it
        takes. A late read goes on and serves a later step: nothing is deleted, and nobody need be told that
        the record is missing. Give its chunk up and release the handle as after damage.
        """
        return self._arrival is None or self._arrival.wait(layer, deadline)

    def is_ready(self, layer: int) -> bool:
        """Whether `wait(layer)` would return True at once."""
        return self._arrival is None or self._arrival.is_ready(layer)

    def __del__(self) -> None:
        if getattr(self, "record", None) is not None:
            self._abandon(self.record)
