from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.keys import KEY_BYTES, Tier
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.rank_copies import RankCopies
from daric_rag.engine.scheduling.scheduler_side import SchedulerSide
from daric_rag.engine.storage.base import StoreEvent

KEYS = [bytes([number + 1]) * KEY_BYTES for number in range(3)]
ACTIONS = st.tuples(
    st.integers(0, 1),
    st.sampled_from(["added", "removed", "lacking"]),
    st.sampled_from(KEYS),
    st.sampled_from(Tier),
)


def event(kind: str, key: bytes, tier: Tier) -> StoreEvent:
    return StoreEvent(kind=kind, key=key, tier=tier)  # type: ignore[arg-type]


@given(st.lists(st.lists(ACTIONS, max_size=4), max_size=12), st.sets(st.sampled_from(KEYS)))
def test_the_index_promises_what_all_ranks_hold(
    steps: list[list[tuple[int, str, bytes, Tier]]], found: set[bytes]
) -> None:
    index = MemoryIndex()
    index.insert(list(found), Tier.DISK)
    side, copies = SchedulerSide(index, 16), RankCopies(2)
    held = [{(key, Tier.DISK) for key in found} for _ in range(2)]
    for step in steps:
        events: dict[int, list[StoreEvent]] = {0: [], 1: []}
        missing: dict[int, list[bytes]] = {0: [], 1: []}
        for rank, action, key, tier in step:
            if action == "lacking":
                if not any(events.values()):  # a step first acquires, then does
                    missing[rank].append(key)
                    held[rank] -= {(key, one) for one in Tier}
            elif ((key, tier) in held[rank]) == (action == "removed"):
                events[rank].append(event(action, key, tier))
                held[rank] ^= {(key, tier)}
        side.apply(*copies.merge(missing, events))
        for key in KEYS:
            promised = index.lookup([[key]]) == [1]
            everywhere = any(all((key, tier) in own for own in held) for tier in Tier)
            assert promised <= everywhere
            if key not in found:
                assert promised == everywhere


def test_what_one_rank_could_not_keep_is_promised_once_it_can() -> None:
    index = MemoryIndex()
    side, copies, (key, *_) = SchedulerSide(index, 16), RankCopies(2), KEYS
    side.apply(*copies.merge({}, {0: [event("added", key, Tier.HOST)]}))
    assert index.lookup([[key]]) == [0]
    side.apply(*copies.merge({1: [key]}, {1: [event("added", key, Tier.HOST)]}))
    assert index.lookup([[key]]) == [1]
    side.apply(*copies.merge({}, {1: [event("removed", key, Tier.HOST)]}))
    assert index.lookup([[key]]) == [0]
