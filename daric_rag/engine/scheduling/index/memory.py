"""The default index: a radix tree over segments in the memory of one engine."""

import threading
import time
from collections.abc import Iterator, Sequence

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.metrics import IndexStats
from daric_rag.engine.scheduling.index.base import FRESH_S, KVIndex, Probe

_NO_TIER: frozenset[Tier] = frozenset()
# One object per combination, shared by all segments.
_TIER_SETS = {tiers: tiers for tiers in (_NO_TIER, *(frozenset({tier}) for tier in Tier), frozenset(Tier))}


class MemoryIndex(KVIndex):
    """The tree as one hash table: a key names its whole path, so a step down costs the same at any size.

    `probe` is asked about the first segment of a chain that is not in the tree; a record that another
    engine wrote to a shared directory is so adopted as a disk copy, without any server between the two. It
    runs inside `lookup`, and one that raises is a miss.
    """

    def __init__(self, probe: Probe | None = None) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._tiers: dict[SegmentKey, frozenset[Tier]] = {}
        self._changes = 0

    @property
    def version(self) -> int:
        """Changes with every update that `lookup` can see; with a probe also every `FRESH_S` seconds."""
        # Neither summand ever falls, so the sum repeats only while both stand still.
        return self._changes + (0 if self._probe is None else int(time.monotonic() / FRESH_S))

    def lookup(self, chains: Sequence[Sequence[SegmentKey]]) -> list[int]:
        """For every chunk's chain of keys, return how many leading segments are stored."""
        with self._lock:
            return [self._depth(chain) for chain in chains]

    def insert(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Add copies of segments, in any order."""
        with self._lock:
            for key in keys:
                self._changes += key not in self._tiers
                self._tiers[key] = _TIER_SETS[self._tiers.get(key, _NO_TIER) | {tier}]

    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget copies; what hangs from a removed segment stays."""
        with self._lock:
            for key in keys:
                kept = _NO_TIER if tier is None else self._tiers.get(key, _NO_TIER) - {tier}
                if kept:
                    self._tiers[key] = _TIER_SETS[kept]
                elif self._tiers.pop(key, None) is not None:
                    self._changes += 1

    def copies(self) -> Iterator[tuple[SegmentKey, Tier]]:
        """Every stored copy, as of the moment of the call."""
        with self._lock:
            stored = list(self._tiers.items())
        return ((key, tier) for key, tiers in stored for tier in tiers)

    def stats(self) -> IndexStats:
        """The number of segments."""
        return IndexStats(segments=len(self._tiers))

    def flush(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Drop the tree."""
        with self._lock:
            self._tiers.clear()
            self._changes += 1

    def _depth(self, chain: Sequence[SegmentKey]) -> int:
        for depth, key in enumerate(chain):
            if key not in self._tiers and not self._adopt(key):
                return depth
        return len(chain)

    def _adopt(self, key: SegmentKey) -> bool:
        """File a record that another engine left in the shared directory, if it has one for this segment."""
        try:
            if self._probe is None or not self._probe(key):
                return False
        except (OSError, ValueError):
            return False
        self._tiers[key] = _TIER_SETS[frozenset({Tier.DISK})]
        return True
