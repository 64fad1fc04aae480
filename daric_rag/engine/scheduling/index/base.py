"""The KV cache index: which segments are stored, and where."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from daric_rag.engine.keys import KEY_BYTES, SEGMENT_TOKENS, SegmentKey
from daric_rag.engine.metrics import IndexStats

UNKNOWN_ROOT: SegmentKey = bytes(KEY_BYTES)
"""Root of a segment that was found in a shared directory, where only its key is written."""


class Tier(StrEnum):
    """Where the KV bytes of a segment lie; a segment may have a copy in both."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A copy of one segment's KV in one tier; `parent` is the segment before it in its chunk, or the root."""

    key: SegmentKey
    parent: SegmentKey
    num_tokens: int
    tier: Tier
    root: SegmentKey

    def __post_init__(self) -> None:
        for name in ("key", "parent", "root"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != KEY_BYTES:
                raise ValueError(f"{name} is {value!r}; a key is {KEY_BYTES} bytes")
        if not 1 <= self.num_tokens <= SEGMENT_TOKENS:
            raise ValueError(f"num_tokens is {self.num_tokens}; allowed is 1 to {SEGMENT_TOKENS}")
        if not isinstance(self.tier, Tier):
            raise ValueError(f"tier is {self.tier!r}; allowed are {', '.join(Tier)}")


Probe = Callable[[SegmentKey], int | None]
"""Asks a shared disk directory for a record: its number of tokens, or None if it has none."""


class KVIndex(ABC):
    """Maps segment keys to where their KV is; safe to call from several threads.

    Keys are chained hashes, so a key stands for a whole path from its root, and a look-up that walks a
    chunk's keys from the front walks a radix tree. The index never holds KV: an entry whose payload is gone
    is a miss, reported back by `repair_missing`.
    """

    @abstractmethod
    def lookup(self, chains: Sequence[Sequence[SegmentKey]]) -> list[int]:
        """For every chunk's chain of keys, return how many leading segments this engine can load.

        Changes no count and no order of eviction. The whole prompt is one call, at most one round trip.
        """

    @abstractmethod
    def touch(self, keys: Sequence[SegmentKey]) -> None:
        """Count one access of each key and remember when; unknown keys are ignored."""

    @abstractmethod
    def insert(self, entries: Sequence[IndexEntry]) -> None:
        """Announce copies; a second tier for a known key is added, a repeated one changes nothing."""

    @abstractmethod
    def set_tier(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Record that copies moved; unknown keys are ignored.

        `HOST` adds a host copy and leaves a disk copy where it is; `DISK` replaces the host copy.
        """

    @abstractmethod
    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget this engine's copies of the keys, in one tier or in all; unknown keys are ignored.

        Segments behind a removed one stay stored, but are found again only once the chain before them is
        whole.
        """

    @abstractmethod
    def repair_missing(self, keys: Sequence[SegmentKey]) -> None:
        """Forget all copies of segments whose payload turned out to be gone, and count them."""

    @abstractmethod
    def entries(self, root: SegmentKey | None = None) -> Iterator[IndexEntry]:
        """Every known copy, of one root or of all; for tools, never for the path of a request."""

    @abstractmethod
    def clear(self, root: SegmentKey | None = None) -> int:
        """Forget every copy under one root, or all, and return how many segments that were; for tools."""

    @abstractmethod
    def stats(self) -> IndexStats:
        """Counters so far; cheap."""

    @abstractmethod
    def flush(self) -> None:
        """Return once every update made before is visible to all users of the index."""

    @abstractmethod
    def close(self) -> None:
        """Release what the index holds; calling it twice is allowed."""
