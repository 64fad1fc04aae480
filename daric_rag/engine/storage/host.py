"""Records in host memory: an arena with a byte budget, what lies in it, and eviction that minds pins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.storage.arena import Arena, aligned
from daric_rag.engine.storage.base import Bytes, RecordSpec
from daric_rag.engine.storage.policy import EvictionPolicy

if TYPE_CHECKING:
    from daric_rag.engine.storage.loader import Load

DETACHED = -1


class State(Enum):
    """Life of a record in host memory."""

    WRITING = auto()
    LOADING = auto()
    READY = auto()
    DEAD = auto()


class HostRecord:
    """One segment's bytes; `pins` counts who relies on `data`, the writer or the load itself included."""

    __slots__ = ("data", "key", "load", "namespace", "num_tokens", "offset", "parent", "pins", "state")

    def __init__(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, namespace: bytes, offset: int, data: Bytes
    ) -> None:
        self.key = key
        self.parent = parent
        self.num_tokens = num_tokens
        self.namespace = namespace
        self.offset = offset
        self.data = data
        self.pins = 1
        self.state = State.WRITING
        self.load: Load | None = None

    @property
    def attached(self) -> bool:
        """Whether the bytes lie in the arena."""
        return self.offset != DETACHED


class HostTier:
    """Not thread-safe: `KVStore` calls it under its lock.

    `on_evict` is called with every record that eviction takes away, while its bytes are still there.
    """

    def __init__(
        self, spec: RecordSpec, nbytes: int, *, pin_memory: bool, on_evict: Callable[[HostRecord], None]
    ) -> None:
        self.spec = spec
        self.arena = Arena(nbytes, pin_memory=pin_memory)
        self._free = self.arena.free_list
        self._on_evict = on_evict
        self._policy = EvictionPolicy()
        self._records: dict[SegmentKey, HostRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena that are taken, alignment included."""
        return self._free.size - self._free.free_bytes

    def get(self, key: SegmentKey) -> HostRecord | None:
        """The record of `key` in whatever state, or None."""
        return self._records.get(key)

    def ready(self) -> Iterator[HostRecord]:
        """All complete records."""
        return (record for record in self._records.values() if record.state is State.READY)

    def reserve(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, namespace: bytes
    ) -> HostRecord | None:
        """A new record, pinned once, in state WRITING; None if it is here already or cannot fit."""
        if key in self._records:
            return None
        nbytes = self.spec.payload_nbytes(num_tokens)
        offset = self._make_room(nbytes)
        if offset is None:
            return None
        record = HostRecord(key, parent, num_tokens, namespace, offset, self.arena.view(offset, nbytes))
        self._records[key] = record
        self._policy.add(key, parent)
        self._policy.pin(key)
        return record

    def detached(
        self,
        key: SegmentKey,
        parent: SegmentKey,
        num_tokens: int,
        namespace: bytes,
        data: Bytes | None = None,
    ) -> HostRecord:
        """A record outside the tier, with memory of its own: for a reader the arena has no room for."""
        if data is None:
            data = np.empty(self.spec.payload_nbytes(num_tokens), dtype=np.uint8)
        record = HostRecord(key, parent, num_tokens, namespace, DETACHED, data)
        record.state = State.READY
        return record

    def publish(self, record: HostRecord) -> None:
        """Writing or loading is done: the record is complete, and its first pin is gone."""
        if record.state is not State.DEAD:
            record.state = State.READY
        self.unpin(record)

    def discard(self, record: HostRecord) -> None:
        """Take the record out of the tier; its bytes stay until the last pin is gone."""
        if record.state is State.DEAD:
            return
        record.state = State.DEAD
        if not record.attached:
            return
        del self._records[record.key]
        self._policy.remove(record.key)
        if not record.pins:
            self._free.release(record.offset, record.data.nbytes)

    def touch(self, record: HostRecord) -> None:
        """Note one use of the record."""
        if record.attached and record.state is not State.DEAD:
            self._policy.touch(record.key)

    def pin(self, record: HostRecord) -> None:
        """Keep the record's bytes where they are until `unpin`."""
        record.pins += 1
        if record.pins == 1 and record.state is not State.DEAD and record.attached:
            self._policy.pin(record.key)

    def unpin(self, record: HostRecord) -> None:
        """Undo one pin."""
        record.pins -= 1
        if record.pins or not record.attached:
            return
        if record.state is State.DEAD:
            self._free.release(record.offset, record.data.nbytes)
        else:
            self._policy.unpin(record.key)

    def _make_room(self, nbytes: int) -> int | None:
        if aligned(nbytes) > self._free.size:
            return None
        while (offset := self._free.allocate(nbytes)) is None:
            victim = self._policy.victim()
            if victim is None:
                return None
            record = self._records[victim]
            self._on_evict(record)
            self.discard(record)
        return offset
