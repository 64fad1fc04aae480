"""Records in host memory: an arena with a byte budget, buffers beside it, and eviction that minds pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto

import numpy as np

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.storage.arena import Arena, aligned
from daric_rag.engine.storage.base import Arrival, Bytes, RecordSpec, StoreEvent
from daric_rag.engine.storage.policy import EvictionPolicy

DETACHED = -1


class State(Enum):
    """Life of a record in host memory."""

    WRITING = auto()
    LOADING = auto()
    READY = auto()
    DEAD = auto()


class HostRecord:
    """One segment's bytes; `pins` counts who relies on `data`: readers, the writer or load, the disk queue."""

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
        self.load: Arrival | None = None

    @property
    def attached(self) -> bool:
        """Whether the bytes lie in the arena."""
        return self.offset != DETACHED


class HostTier:
    """Not thread-safe: `KVStore` calls it under its lock.

    A record that finds no room in the arena may lie beside it, detached, within a budget of its own: as long
    as it is pinned and no longer.
    """

    def __init__(
        self,
        spec: RecordSpec,
        nbytes: int,
        *,
        detached_budget: int,
        pin_memory: bool,
        events: list[StoreEvent],
        counts: Counter[str],
    ) -> None:
        self.spec = spec
        self.arena = Arena(nbytes, pin_memory=pin_memory)
        self.detached_budget = detached_budget
        self.detached_bytes = 0
        self._free = self.arena.free_list
        self._events = events
        self._counts = counts
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

    def fits(self, num_tokens: int) -> bool:
        """Whether the arena could hold such a record if nothing else lay in it."""
        return aligned(self.spec.payload_nbytes(num_tokens)) <= self._free.size

    def reserve(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, namespace: bytes, *, accesses: int = 1
    ) -> HostRecord | None:
        """A new record, pinned once, in state WRITING; None if it is here already or cannot fit."""
        if key in self._records or not self.fits(num_tokens):
            return None
        nbytes = self.spec.payload_nbytes(num_tokens)
        offset = self._make_room(nbytes)
        if offset is None:
            return None
        record = HostRecord(key, parent, num_tokens, namespace, offset, self.arena.view(offset, nbytes))
        self._records[key] = record
        self._policy.add(key, parent, accesses=accesses)
        self._policy.pin(key)
        return record

    def detached(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, namespace: bytes
    ) -> HostRecord | None:
        """The same beside the arena; None if it is here already or the budget is spent."""
        nbytes = self.spec.payload_nbytes(num_tokens)
        if key in self._records or self.detached_bytes + nbytes > self.detached_budget:
            return None
        self.detached_bytes += nbytes
        data = np.empty(nbytes, dtype=np.uint8)
        record = self._records[key] = HostRecord(key, parent, num_tokens, namespace, DETACHED, data)
        return record

    def publish(self, record: HostRecord) -> None:
        """Writing or loading is done: the record is complete, and its first pin is gone."""
        record.state = State.READY
        self._events.append(StoreEvent("added", record.key, Tier.HOST))
        self.unpin(record)

    def discard(self, record: HostRecord) -> None:
        """Take the record out of the tier; its bytes stay until the last pin is gone."""
        if record.state is State.DEAD:
            return
        if record.state is State.READY:
            self._events.append(StoreEvent("removed", record.key, Tier.HOST))
        record.state = State.DEAD
        del self._records[record.key]
        if record.attached:
            self._policy.remove(record.key)
        if not record.pins:
            self._give_back(record)

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
        if record.pins:
            return
        if record.state is State.DEAD:
            self._give_back(record)
        elif record.attached:
            self._policy.unpin(record.key)
        else:
            self.discard(record)

    def _make_room(self, nbytes: int) -> int | None:
        while (offset := self._free.allocate(nbytes)) is None:
            victim = self._policy.victim()
            if victim is None:
                return None
            self._counts["evictions"] += 1
            self.discard(self._records[victim])
        return offset

    def _give_back(self, record: HostRecord) -> None:
        if record.attached:
            self._free.release(record.offset, record.data.nbytes)
        else:
            self.detached_bytes -= record.data.nbytes
