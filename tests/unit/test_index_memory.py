"""The in-memory radix tree, against a model made of dictionaries."""

import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from daric_rag.config import DaricConfig
from daric_rag.engine.keys import Segment, SegmentKey, Tier, root_key, segment_chain
from daric_rag.engine.scheduling.index import MemoryIndex, new_index, open_index, shared_disk_id
from daric_rag.engine.scheduling.index import memory as memory_module
from tests.storage_support import ROOT, key_of, open_store, save

ROOTS = [root_key({"namespace": name}) for name in "ab"]


def chunk(root: SegmentKey, length: int, branch: int = 0, fork: int = 0) -> tuple[Segment, ...]:
    """A chunk of `length` segments that is the same as its siblings up to segment `fork`."""
    tokens = [0] * (256 * fork) + [branch + 1] * (256 * (length - fork) - 7)
    return segment_chain(root, tokens)


def keys(chain: tuple[Segment, ...]) -> list[SegmentKey]:
    return [segment.key for segment in chain]


# Few keys, so that operations meet: two chunks that part after their first segment, one under another root.
CHAINS = [
    chunk(root, length, branch, 1)
    for root, length, branch in ((ROOTS[0], 3, 0), (ROOTS[0], 4, 1), (ROOTS[1], 2, 0))
]
KEYS = st.sampled_from(sorted({segment.key for chain in CHAINS for segment in chain}))
KEY_LISTS = st.lists(KEYS, max_size=6)
TIERS = st.sampled_from(list(Tier))


class TreeMachine(RuleBasedStateMachine):
    """Every operation on the tree and on `copies`: key -> the tiers it is in."""

    @initialize()
    def start(self) -> None:
        self.index = MemoryIndex()
        self.copies: dict[SegmentKey, set[Tier]] = {}
        self.seen: dict[int, list[int]] = {}

    @rule(chosen=KEY_LISTS, tier=TIERS)
    def insert(self, chosen: list[SegmentKey], tier: Tier) -> None:
        self.index.insert(chosen, tier)
        for key in chosen:
            self.copies.setdefault(key, set()).add(tier)

    @rule(chosen=KEY_LISTS, tier=st.none() | TIERS)
    def remove(self, chosen: list[SegmentKey], tier: Tier | None) -> None:
        self.index.remove(chosen, tier)
        for key in chosen:
            self.copies[key] = set() if tier is None else self.copies.get(key, set()) - {tier}
            if not self.copies[key]:
                self.copies.pop(key)

    @invariant()
    def lookups_agree(self) -> None:
        expected = []
        for chain in CHAINS:
            stored = [key in self.copies for key in keys(chain)]
            expected.append([*stored, False].index(False))
        version = self.index.version
        assert self.index.lookup([*map(keys, CHAINS)]) == expected
        assert self.seen.setdefault(version, expected) == expected, "another answer under the same version"

    @invariant()
    def listings_agree(self) -> None:
        listed = list(self.index.copies())
        assert len(listed) == len(set(listed))
        assert set(listed) == {(key, tier) for key, tiers in self.copies.items() for tier in tiers}
        assert self.index.stats().segments == len(self.copies)


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTree = TreeMachine.TestCase


def test_a_removed_segment_hides_its_children_until_it_is_back() -> None:
    index = MemoryIndex()
    chain = keys(CHAINS[0])
    index.insert(chain[::-1], Tier.HOST)
    index.remove([chain[1]])
    assert index.lookup([chain, []]) == [1, 0]
    index.insert([chain[1]], Tier.HOST)
    assert index.lookup([chain]) == [3]


def test_namespaces_share_no_hit() -> None:
    index = MemoryIndex()
    index.insert(keys(chunk(ROOTS[0], 3)), Tier.HOST)
    assert index.lookup([keys(chunk(ROOTS[1], 3))]) == [0]


def test_records_of_another_engine_are_adopted_once() -> None:
    chain = keys(CHAINS[0])
    on_disk = set(chain[:2])
    asked = []

    def probe(key: SegmentKey) -> bool:
        asked.append(key)
        return key in on_disk

    index = MemoryIndex(probe)
    assert index.lookup([chain]) == [2]
    assert asked == chain
    assert index.lookup([chain]) == [2]
    assert asked == [*chain, chain[2]]
    assert set(index.copies()) == {(key, Tier.DISK) for key in on_disk}


def test_version_follows_time_only_where_others_store_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(memory_module.time, "monotonic", lambda: now)
    alone, shared = MemoryIndex(), MemoryIndex(lambda key: False)
    before = alone.version, shared.version
    now += 0.06
    assert alone.version == before[0] and shared.version != before[1]
    for index in (alone, shared):
        version = index.version
        index.lookup([keys(CHAINS[0])])
        index.remove(keys(CHAINS[0]))
        assert index.version == version
        index.insert(keys(CHAINS[0]), Tier.HOST)
        assert index.version != version


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("damaged")])
def test_a_probe_that_fails_is_a_miss(error: Exception) -> None:
    def probe(key: SegmentKey) -> bool:
        raise error

    index = MemoryIndex(probe)
    assert index.lookup([keys(CHAINS[0])]) == [0]
    assert index.stats().segments == 0


def test_threads_do_not_disturb_each_other() -> None:
    index = MemoryIndex()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        chain = keys(chunk(root_key({"namespace": number}), 4, number))
        try:
            for _ in range(200):
                index.insert(chain, Tier.HOST)
                assert index.lookup([chain]) == [4]
                index.remove([chain[2]])
                assert index.lookup([chain]) == [2]
                assert {key for key, _ in index.copies()} >= {*chain[:2], chain[3]}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert index.stats().segments == 18


def test_new_index_knows_memory_and_redis_only() -> None:
    assert isinstance(new_index("memory"), MemoryIndex)
    with pytest.raises(ValueError, match="memory") as caught:
        new_index("http://user:secret@host")
    assert "secret" not in str(caught.value)


def test_only_what_every_rank_has_is_a_hit(tmp_path: Path) -> None:
    for rank, numbers in enumerate(((1, 2, 3), (2, 3, 4))):
        store = open_store(tmp_path, rank=rank)
        assert all(save(store, key_of(number)) for number in numbers)
        store.close()
    config = DaricConfig(disk_path=str(tmp_path))
    chains = [[key_of(number)] for number in range(1, 7)]
    index = open_index(config, ROOT, num_ranks=2)
    assert index.lookup(chains) == [0, 1, 1, 0, 0, 0]
    for rank, numbers in enumerate(((4, 5, 6), (1, 5))):  # and so for what comes later
        store = open_store(tmp_path, rank=rank)
        assert all(save(store, key_of(number)) for number in numbers)
        store.close()
    assert index.lookup(chains) == [1, 1, 1, 1, 1, 0]


def test_a_shared_directory_has_one_id(tmp_path_factory: pytest.TempPathFactory) -> None:
    one, other = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    link = other / "link"
    link.symlink_to(one)
    assert shared_disk_id(one) == shared_disk_id(str(link)) != shared_disk_id(other)
