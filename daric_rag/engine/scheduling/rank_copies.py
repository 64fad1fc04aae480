"""Which segments all tensor-parallel ranks hold: only those can be promised to a request. Pure logic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.storage.base import StoreEvent


class RankCopies:
    """Turns what the stores of several ranks did, each in its own time, into what became of the whole segments.

    What was on disk when the index was made needs no event: the index knows that all ranks have it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        # Ranks that told of a copy of a segment in a tier, and not of its end.
        self._holders: defaultdict[tuple[SegmentKey, Tier], set[int]] = defaultdict(set)

    def merge(
        self, missing: Mapping[int, Sequence[SegmentKey]], events: Mapping[int, Sequence[StoreEvent]]
    ) -> tuple[list[SegmentKey], list[StoreEvent]]:
        """By rank: segments that its store turned out to lack, and what it did after that.

        Returns the same of all ranks as if they were one: what one lacks is lacking, what all have is there.
        """
        if self._num_ranks == 1:
            return list(missing.get(0, ())), list(events.get(0, ()))
        for rank, keys in missing.items():
            for key in keys:
                for tier in Tier:
                    self._lose(rank, key, tier)
        told = [event for rank, own in sorted(events.items()) for event in own if self._is_news(rank, event)]
        return [key for keys in missing.values() for key in keys], told

    def _is_news(self, rank: int, event: StoreEvent) -> bool:
        if event.kind == "removed":
            self._lose(rank, event.key, event.tier)
            return True
        holders = self._holders[event.key, event.tier]
        holders.add(rank)
        return len(holders) == self._num_ranks

    def _lose(self, rank: int, key: SegmentKey, tier: Tier) -> None:
        self._holders[key, tier].discard(rank)
        if not self._holders[key, tier]:
            del self._holders[key, tier]
