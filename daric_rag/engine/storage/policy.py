"""Which record goes next: least recently used, weighted by frequency, a chunk's end before its beginning."""

from __future__ import annotations

import heapq
import math
from itertools import count

from daric_rag.engine.keys import SegmentKey

MAX_TURNS = 4.0
MAX_ACCESSES = int(2**MAX_TURNS)
"""Uses beyond this many change nothing any more."""


class _Entry:
    __slots__ = ("accesses", "key", "parent", "pins", "queued", "score", "tick")

    def __init__(self, key: SegmentKey, parent: SegmentKey, accesses: int) -> None:
        self.key = key
        self.parent = parent
        self.accesses = accesses
        self.pins = 0
        self.tick = 0
        self.score = 0.0
        self.queued = False


class EvictionPolicy:
    """The order in which one tier gives up its records.

    A record's score is the time of its last access, counted in accesses, plus one *turn* (as many accesses
    as there are records) for every doubling of its access count, at most `MAX_TURNS`. A record with pins is
    never chosen, nor one with children here: a segment is useless without those before it in its chunk.

    Scores never fall, so the heap keeps one lower bound a record and corrects it when the record comes up:
    touching costs O(1) for each segment up to the chunk's first, `victim` amortised O(log n).

    `min_turn`: a turn is at least this long, for as long as the tier is being filled from what it held before.
    """

    def __init__(self) -> None:
        self._entries: dict[SegmentKey, _Entry] = {}
        self._children: dict[SegmentKey, int] = {}
        self._heap: list[tuple[float, int, _Entry]] = []
        self._order = count()
        self._tick = 0
        self.min_turn = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: SegmentKey) -> bool:
        return key in self._entries

    def add(self, key: SegmentKey, parent: SegmentKey, *, accesses: int = 1) -> None:
        """Start to account for `key`, as just used; its parent need not be here."""
        if key in self._entries:
            raise ValueError(f"key={key.hex()}: already here")
        entry = self._entries[key] = _Entry(key, parent, accesses)
        if parent and parent != key:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._advance()
        self._rescore(entry)
        self._queue(entry)

    def touch(self, key: SegmentKey) -> None:
        """Note a use of `key`, which is a use of the segments it continues."""
        self._advance()
        entry: _Entry | None = self._entries[key]
        assert entry is not None
        entry.accesses += 1
        while entry is not None and entry.tick != self._tick:  # a cycle of damaged parents ends here too
            self._rescore(entry)
            entry = self._entries.get(entry.parent)

    def accesses(self, key: SegmentKey) -> int:
        """How often `key` was used, as far as that counts."""
        return min(self._entries[key].accesses, MAX_ACCESSES)

    def pin(self, key: SegmentKey) -> None:
        """Keep `key` until as many `unpin` calls."""
        self._entries[key].pins += 1

    def unpin(self, key: SegmentKey) -> None:
        """Undo one `pin`."""
        entry = self._entries[key]
        if not entry.pins:
            raise ValueError(f"key={key.hex()}: not pinned")
        entry.pins -= 1
        self._queue(entry)

    def remove(self, key: SegmentKey) -> None:
        """Forget `key`, pinned or not."""
        entry = self._entries.pop(key)
        if not entry.parent or entry.parent == key:
            return
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
            parent = self._entries.get(entry.parent)
            if parent is not None:
                self._queue(parent)

    def victim(self) -> SegmentKey | None:
        """The record to give up next (the caller removes it), or None when all are pinned or continued."""
        heap = self._heap
        while heap:
            score, _, entry = heap[0]
            if self._entries.get(entry.key) is not entry:
                heapq.heappop(heap)
            elif not self._evictable(entry):
                heapq.heappop(heap)
                entry.queued = False
            elif entry.score > score:
                heapq.heapreplace(heap, (entry.score, next(self._order), entry))
            else:
                return entry.key
        return None

    def _evictable(self, entry: _Entry) -> bool:
        return not entry.pins and entry.key not in self._children

    def _advance(self) -> None:
        self._tick += 1

    def _rescore(self, entry: _Entry) -> None:
        entry.tick = self._tick
        turns = min(math.log2(entry.accesses), MAX_TURNS)
        entry.score = max(entry.score, self._tick + turns * max(len(self._entries), self.min_turn))

    def _queue(self, entry: _Entry) -> None:
        if entry.queued or not self._evictable(entry):
            return
        entry.queued = True
        heapq.heappush(self._heap, (entry.score, next(self._order), entry))
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._drop_forgotten()

    def _drop_forgotten(self) -> None:
        self._heap = [item for item in self._heap if self._entries.get(item[2].key) is item[2]]
        heapq.heapify(self._heap)
