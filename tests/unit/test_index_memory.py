"""The in-memory radix tree, against a model made of dictionaries."""

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from daric_rag.engine.scheduling.index import (
    UNKNOWN_ROOT,
    IndexEntry,
    MemoryIndex,
    Segment,
    SegmentKey,
    Tier,
    open_index,
    root_key,
    segment_chain,
    shared_disk_id,
)

ROOTS = [root_key({"namespace": name}) for name in "ab"]


def chunk(root: SegmentKey, length: int, branch: int = 0, fork: int = 0) -> tuple[Segment, ...]:
    """A chunk of `length` segments that is the same as its siblings up to segment `fork`."""
    tokens = [0] * (256 * fork) + [branch + 1] * (256 * (length - fork) - 7)
    return segment_chain(root, tokens)


def entry(root: SegmentKey, segment: Segment, tier: Tier = Tier.HOST) -> IndexEntry:
    return IndexEntry(segment.key, segment.parent, segment.num_tokens, tier, root)


def keys(chain: tuple[Segment, ...]) -> list[SegmentKey]:
    return [segment.key for segment in chain]


# Few keys, so that operations meet: two chunks that part after their first segment, one under another root.
CHAINS = [
    (root, chunk(root, length, branch, 1))
    for root, length, branch in ((ROOTS[0], 3, 0), (ROOTS[0], 4, 1), (ROOTS[1], 2, 0))
]
SEGMENTS = {segment.key: (root, segment) for root, chain in CHAINS for segment in chain}
KEYS = st.sampled_from(sorted(SEGMENTS))
KEY_LISTS = st.lists(KEYS, max_size=6)
TIERS = st.sampled_from(list(Tier))


class TreeMachine(RuleBasedStateMachine):
    """Every operation on the tree and on `copies`: key -> the tiers it is in."""

    @initialize()
    def start(self) -> None:
        self.index = MemoryIndex()
        self.copies: dict[SegmentKey, set[Tier]] = {}
        self.accesses: dict[SegmentKey, int] = {}

    @rule(chosen=st.lists(st.tuples(KEYS, TIERS), max_size=6))
    def insert(self, chosen: list[tuple[SegmentKey, Tier]]) -> None:
        self.index.insert([entry(*SEGMENTS[key], tier) for key, tier in chosen])
        for key, tier in chosen:
            self.copies.setdefault(key, set()).add(tier)
            self.accesses.setdefault(key, 0)

    @rule(chosen=KEY_LISTS, tier=TIERS)
    def set_tier(self, chosen: list[SegmentKey], tier: Tier) -> None:
        self.index.set_tier(chosen, tier)
        for key in self.copies.keys() & set(chosen):
            if tier is Tier.DISK:
                self.copies[key].discard(Tier.HOST)
            self.copies[key].add(tier)

    @rule(chosen=KEY_LISTS, tier=st.none() | TIERS)
    def remove(self, chosen: list[SegmentKey], tier: Tier | None) -> None:
        self.index.remove(chosen, tier)
        for key in chosen:
            self.copies[key] = set() if tier is None else self.copies.get(key, set()) - {tier}
            if not self.copies[key]:
                self.copies.pop(key)
                self.accesses.pop(key, None)

    @rule(chosen=KEY_LISTS)
    def repair(self, chosen: list[SegmentKey]) -> None:
        before = self.index.stats().repaired
        self.index.repair_missing(chosen)
        assert self.index.stats().repaired - before == sum(key in self.copies for key in chosen)
        for key in chosen:
            self.copies.pop(key, None)
            self.accesses.pop(key, None)

    @rule(chosen=KEY_LISTS)
    def touch(self, chosen: list[SegmentKey]) -> None:
        self.index.touch(chosen)
        for key in chosen:
            if key in self.accesses:
                self.accesses[key] += 1

    @rule(root=st.sampled_from(ROOTS))
    def clear(self, root: SegmentKey) -> None:
        gone = [key for key in self.copies if SEGMENTS[key][0] == root]
        assert self.index.clear(root) == len(gone)
        for key in gone:
            del self.copies[key], self.accesses[key]

    @invariant()
    def lookups_agree(self) -> None:
        expected = []
        for _, chain in CHAINS:
            stored = [key in self.copies for key in keys(chain)]
            expected.append([*stored, False].index(False))
        assert self.index.lookup([keys(chain) for _, chain in CHAINS]) == expected

    @invariant()
    def nodes_agree(self) -> None:
        for key, (root, segment) in SEGMENTS.items():
            node = self.index.node(key)
            if key not in self.copies:
                assert node is None
                continue
            assert node is not None
            assert (node.tiers, node.access_count) == (self.copies[key], self.accesses[key])
            assert (node.parent, node.root, node.num_tokens) == (segment.parent, root, segment.num_tokens)
            assert node.tier is (Tier.HOST if Tier.HOST in self.copies[key] else Tier.DISK)

    @invariant()
    def listings_agree(self) -> None:
        listed = list(self.index.entries())
        assert len(listed) == len(set(listed))
        assert set(listed) == {
            entry(*SEGMENTS[key], tier) for key, tiers in self.copies.items() for tier in tiers
        }
        for root in ROOTS:
            assert set(self.index.entries(root)) == {item for item in listed if item.root == root}
        stats = self.index.stats()
        assert stats.segments == len(self.copies)
        assert stats.tiers == {tier: sum(tier in tiers for tiers in self.copies.values()) for tier in Tier}

    @invariant()
    def descendants_agree(self) -> None:
        for ancestor in [*ROOTS, *SEGMENTS]:
            reached: set[SegmentKey] = set()
            while True:
                more = {
                    key
                    for key in self.copies
                    if SEGMENTS[key][1].parent in {ancestor, *reached} and key not in reached
                }
                if not more:
                    break
                reached |= more
            assert set(self.index.descendants(ancestor)) == reached


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTree = TreeMachine.TestCase


def test_a_lookup_changes_nothing_but_its_own_counters() -> None:
    index = MemoryIndex()
    root, chain = CHAINS[0]
    index.insert([entry(root, segment) for segment in chain])
    before = [index.node(key) for key in keys(chain)]
    assert index.lookup([keys(chain), [], [UNKNOWN_ROOT]]) == [3, 0, 0]
    assert [index.node(key) for key in keys(chain)] == before
    stats = index.stats()
    assert (stats.lookups, stats.looked_up_segments, stats.hit_segments) == (1, 4, 3)


def test_a_removed_segment_hides_its_children_until_it_is_back() -> None:
    index = MemoryIndex()
    root, chain = CHAINS[0]
    index.insert([entry(root, segment) for segment in reversed(chain)])
    index.remove([chain[1].key])
    assert index.lookup([keys(chain)]) == [1]
    assert index.descendants(chain[1].key) == [chain[2].key]
    index.insert([entry(root, chain[1])])
    assert index.lookup([keys(chain)]) == [3]


def test_namespaces_share_no_hit() -> None:
    index = MemoryIndex()
    index.insert([entry(ROOTS[0], segment) for segment in chunk(ROOTS[0], 3)])
    assert index.lookup([keys(chunk(ROOTS[1], 3))]) == [0]


def test_records_of_another_engine_are_adopted_once() -> None:
    root, chain = CHAINS[0]
    on_disk = {segment.key: segment.num_tokens for segment in chain[:2]}
    asked = []

    def probe(key: SegmentKey) -> int | None:
        asked.append(key)
        return on_disk.get(key)

    index = MemoryIndex(probe)
    assert index.lookup([keys(chain)]) == [2]
    assert asked == keys(chain)
    assert index.lookup([keys(chain)]) == [2]
    assert asked == [*keys(chain), chain[2].key]
    adopted = index.node(chain[0].key)
    assert adopted is not None and adopted.root == UNKNOWN_ROOT and adopted.tier is Tier.DISK
    index.insert([entry(root, chain[0])])
    known = index.node(chain[0].key)
    assert known is not None and (known.root, known.parent) == (root, root)
    assert known.tiers == set(Tier)
    assert set(index.descendants(root)) == set(keys(chain[:2]))


@pytest.mark.parametrize("answer", [OSError("gone"), ValueError("damaged"), 0, -1, 257, 10**30])
def test_a_probe_that_fails_or_lies_is_a_miss(answer: Exception | int) -> None:
    def probe(key: SegmentKey) -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer

    index = MemoryIndex(probe)
    assert index.lookup([keys(CHAINS[0][1])]) == [0]
    assert index.stats().segments == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", b"short"),
        ("parent", "text"),
        ("root", b""),
        ("num_tokens", 0),
        ("num_tokens", 257),
        ("tier", "host2"),
    ],
)
def test_an_entry_with_nonsense_is_refused_by_name(field: str, value: object) -> None:
    good = {"key": ROOTS[0], "parent": ROOTS[1], "num_tokens": 5, "tier": Tier.HOST, "root": ROOTS[1]}
    IndexEntry(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        IndexEntry(**good | {field: value})  # type: ignore[arg-type]


def test_threads_do_not_disturb_each_other() -> None:
    index = MemoryIndex()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        root = root_key({"namespace": number})
        chain = chunk(root, 4, number)
        try:
            for _ in range(200):
                index.insert([entry(root, segment) for segment in chain])
                index.touch(keys(chain))
                assert index.lookup([keys(chain)]) == [4]
                index.remove([chain[2].key])
                assert index.lookup([keys(chain)]) == [2]
                assert len(list(index.entries(root))) == 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.stats().segments == 18


def test_open_index_knows_memory_and_redis_only() -> None:
    assert isinstance(open_index("memory"), MemoryIndex)
    with pytest.raises(ValueError, match="memory") as caught:
        open_index("http://user:secret@host")
    assert "secret" not in str(caught.value)


def test_a_shared_directory_has_one_id(tmp_path_factory: pytest.TempPathFactory) -> None:
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    link = other / "link"
    link.symlink_to(one)
    assert shared_disk_id(one) == shared_disk_id(str(link)) != shared_disk_id(other)
