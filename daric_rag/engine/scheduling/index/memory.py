"""The default index: a radix tree over segments in the memory of one engine."""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import IndexStats
from daric_rag.engine.scheduling.index.base import UNKNOWN_ROOT, IndexEntry, KVIndex, Probe, Tier

_NO_TIER: frozenset[Tier] = frozenset()
# One object per combination, shared by all nodes.
_TIER_SETS = {tiers: tiers for tiers in (_NO_TIER, *(frozenset({tier}) for tier in Tier), frozenset(Tier))}


@dataclass(slots=True)
class IndexNode:
    """One segment of the tree; `last_access` in seconds since the epoch."""

    parent: SegmentKey
    root: SegmentKey
    num_tokens: int
    tiers: frozenset[Tier]
    last_access: float
    access_count: int = 0

    @property
    def tier(self) -> Tier:
        """The fastest tier that has a copy."""
        return Tier.HOST if Tier.HOST in self.tiers else Tier.DISK


class MemoryIndex(KVIndex):
    """Radix tree whose edges are segments, held in hash tables: a step down costs the same at any size.

    `probe` is asked about the first segment of a chain that is not in the tree; a record that another
    engine wrote to a shared directory is so adopted as a disk copy, without any server between the two. It
    runs inside `lookup`, and one that raises is a miss.
    """

    def __init__(self, probe: Probe | None = None) -> None:
        self._probe = probe
        self._lock = threading.RLock()
        self._nodes: dict[SegmentKey, IndexNode] = {}
        # Children by parent key, roots included; also kept while the parent itself is not stored. An only
        # child, the usual case, is held bare: a set each would be most of the index's memory.
        self._children: dict[SegmentKey, SegmentKey | set[SegmentKey]] = {}
        self._tier_sizes = dict.fromkeys(Tier, 0)
        self._lookups = self._looked_up = self._hits = 0
        self._inserted = self._removed = self._repaired = 0

    def lookup(self, chains: Sequence[Sequence[SegmentKey]]) -> list[int]:
        """For every chunk's chain of keys, return how many leading segments are stored."""
        with self._lock:
            depths = [self._depth(chain) for chain in chains]
            self._lookups += 1
            self._looked_up += sum(map(len, chains))
            self._hits += sum(depths)
            return depths

    def touch(self, keys: Sequence[SegmentKey]) -> None:
        """Count one access of each stored key."""
        now = time.time()
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is not None:
                    node.access_count += 1
                    node.last_access = now

    def insert(self, entries: Sequence[IndexEntry]) -> None:
        """Add copies of segments, in any order."""
        now = time.time()
        with self._lock:
            for entry in entries:
                self._insert(entry, now)

    def set_tier(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Record that copies of stored keys moved to `tier`."""
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is not None:
                    keep = node.tiers if tier is Tier.HOST else _NO_TIER
                    self._set_tiers(node, keep | {tier})

    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget copies; what hangs from a removed segment stays."""
        with self._lock:
            for key in keys:
                node = self._nodes.get(key)
                if node is None or (tier is not None and tier not in node.tiers):
                    continue
                self._set_tiers(node, _NO_TIER if tier is None else node.tiers - {tier})
                self._removed += 1
                if not node.tiers:
                    self._unlink(key, node)

    def repair_missing(self, keys: Sequence[SegmentKey]) -> None:
        """Forget all copies of segments whose payload turned out to be gone."""
        with self._lock:
            known = [key for key in keys if key in self._nodes]
            self._repaired += len(known)
            self.remove(known)

    def node(self, key: SegmentKey) -> IndexNode | None:
        """Return a copy of what is known of one segment, or None."""
        with self._lock:
            node = self._nodes.get(key)
            if node is None:
                return None
            return IndexNode(
                node.parent, node.root, node.num_tokens, node.tiers, node.last_access, node.access_count
            )

    def descendants(self, key: SegmentKey) -> list[SegmentKey]:
        """Stored segments reached only through `key` (a segment or a root), nearest first.

        An eviction that takes `key` makes them useless until it is stored again.
        """
        with self._lock:
            found: list[SegmentKey] = []
            generation = [key]
            while generation:
                generation = [child for parent in generation for child in self._children_of(parent)]
                found += generation
            return found

    def entries(self, root: SegmentKey | None = None) -> Iterator[IndexEntry]:
        """Every stored copy, of one root or of all, as of the moment of the call."""
        with self._lock:
            stored = [(key, node, node.tiers) for key, node in self._nodes.items()]
        for key, node, tiers in stored:
            if root is None or node.root == root:
                for tier in sorted(tiers):
                    yield IndexEntry(key, node.parent, node.num_tokens, tier, node.root)

    def clear(self, root: SegmentKey | None = None) -> int:
        """Forget every segment under one root, or all; returns their number."""
        with self._lock:
            keys = [key for key, node in self._nodes.items() if root is None or node.root == root]
            self.remove(keys)
            return len(keys)

    def stats(self) -> IndexStats:
        """Counters so far."""
        with self._lock:
            return IndexStats(
                segments=len(self._nodes),
                lookups=self._lookups,
                looked_up_segments=self._looked_up,
                hit_segments=self._hits,
                inserted=self._inserted,
                removed=self._removed,
                repaired=self._repaired,
                tiers=dict(self._tier_sizes),
            )

    def flush(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Drop the tree."""
        self.clear()

    def _depth(self, chain: Sequence[SegmentKey]) -> int:
        nodes = self._nodes
        for depth, key in enumerate(chain):
            if key not in nodes and not self._adopt(chain, depth):
                return depth
        return len(chain)

    def _adopt(self, chain: Sequence[SegmentKey], depth: int) -> bool:
        """File a record that another engine left in the shared directory, if it has one for this segment."""
        if self._probe is None:
            return False
        parent = chain[depth - 1] if depth else UNKNOWN_ROOT
        root = self._nodes[parent].root if depth else UNKNOWN_ROOT
        try:
            num_tokens = self._probe(chain[depth])
            if num_tokens is None:
                return False
            entry = IndexEntry(chain[depth], parent, num_tokens, Tier.DISK, root)
        except (OSError, ValueError):
            return False
        self._insert(entry, time.time())
        return True

    def _insert(self, entry: IndexEntry, now: float) -> None:
        node = self._nodes.get(entry.key)
        if node is None:
            node = IndexNode(entry.parent, entry.root, entry.num_tokens, _NO_TIER, now)
            self._link(entry.key, node)
        elif node.root == UNKNOWN_ROOT != entry.root:
            self._unlink(entry.key, node)
            node.parent, node.root = entry.parent, entry.root
            self._link(entry.key, node)
        if entry.tier not in node.tiers:
            self._set_tiers(node, node.tiers | {entry.tier})
            self._inserted += 1

    def _set_tiers(self, node: IndexNode, tiers: frozenset[Tier]) -> None:
        for tier in node.tiers - tiers:
            self._tier_sizes[tier] -= 1
        for tier in tiers - node.tiers:
            self._tier_sizes[tier] += 1
        node.tiers = _TIER_SETS[tiers]

    def _children_of(self, parent: SegmentKey) -> list[SegmentKey]:
        children = self._children.get(parent)
        if children is None:
            return []
        return sorted(children) if isinstance(children, set) else [children]

    def _link(self, key: SegmentKey, node: IndexNode) -> None:
        self._nodes[key] = node
        siblings = self._children.setdefault(node.parent, key)
        if isinstance(siblings, set):
            siblings.add(key)
        elif siblings != key:
            self._children[node.parent] = {siblings, key}

    def _unlink(self, key: SegmentKey, node: IndexNode) -> None:
        del self._nodes[key]
        siblings = self._children[node.parent]
        if isinstance(siblings, set):
            siblings.discard(key)
        if not siblings or siblings == key:
            del self._children[node.parent]
