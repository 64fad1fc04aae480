"""Which record is given up next."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.storage.policy import EvictionPolicy
from tests.storage_support import key_of


def drain(policy: EvictionPolicy) -> list[bytes]:
    order = []
    while (key := policy.victim()) is not None:
        policy.remove(key)
        order.append(key)
    return order


def filled(count: int) -> EvictionPolicy:
    policy = EvictionPolicy()
    for number in range(count):
        policy.add(key_of(number), b"")
    return policy


def test_least_recently_used_goes_first() -> None:
    policy = EvictionPolicy()
    for number in range(4):
        policy.add(key_of(number), b"")
    policy.touch(key_of(0))
    assert drain(policy) == [key_of(number) for number in (1, 2, 3, 0)]


@given(st.lists(st.integers(0, 7), min_size=1))
def test_equal_frequency_is_plain_lru(uses: list[int]) -> None:
    policy, model = EvictionPolicy(), OrderedDict[int, None]()
    for number in uses:
        if number in model:  # a use that starts the count anew: frequency stays 1
            policy.remove(key_of(number))
            del model[number]
        policy.add(key_of(number), b"")
        model[number] = None
    assert drain(policy) == [key_of(number) for number in model]


def test_frequent_record_outlives_newer_ones_but_not_for_ever() -> None:
    policy = filled(8)
    for _ in range(7):
        policy.touch(key_of(0))
    for number in range(1, 8):
        policy.touch(key_of(number))
    assert policy.victim() != key_of(0)
    for number in range(100, 200):  # one-time records pass through
        policy.add(key_of(number), b"")
        victim = policy.victim()
        assert victim is not None
        policy.remove(victim)
    assert key_of(0) not in policy


def test_end_of_chunk_goes_before_its_beginning_however_old() -> None:
    policy = EvictionPolicy()
    for number in range(3):
        policy.add(key_of(number), key_of(number - 1) if number else b"")
    policy.add(key_of(9), b"")
    assert drain(policy) == [key_of(number) for number in (2, 1, 0, 9)]


def test_child_that_arrives_before_its_parent_protects_it() -> None:
    policy = EvictionPolicy()
    policy.add(key_of(1), key_of(0))
    policy.add(key_of(0), b"")
    assert drain(policy) == [key_of(1), key_of(0)]


def test_touching_a_child_touches_what_it_continues() -> None:
    policy = EvictionPolicy()
    policy.add(key_of(0), b"")
    policy.add(key_of(1), key_of(0))
    policy.add(key_of(2), b"")
    policy.touch(key_of(1))
    policy.remove(key_of(1))
    assert drain(policy) == [key_of(2), key_of(0)]


def test_pins_protect_and_parents_of_pinned_too() -> None:
    policy = EvictionPolicy()
    policy.add(key_of(0), b"")
    policy.add(key_of(1), key_of(0))
    policy.pin(key_of(1))
    policy.pin(key_of(1))
    assert policy.victim() is None
    policy.unpin(key_of(1))
    assert policy.victim() is None
    policy.unpin(key_of(1))
    assert policy.victim() == key_of(1)
    with pytest.raises(ValueError, match="not pinned"):
        policy.unpin(key_of(1))


def test_parents_that_name_each_other_end_nowhere() -> None:
    policy = EvictionPolicy()
    policy.add(key_of(0), key_of(1))
    policy.add(key_of(1), key_of(0))
    policy.add(key_of(2), key_of(2))
    policy.touch(key_of(0))
    assert drain(policy) == [key_of(2)]


def test_heap_stays_small_when_records_leave_by_themselves() -> None:
    policy = filled(4)
    for number in range(10, 5000):
        policy.add(key_of(number), b"")
        policy.remove(key_of(number))
    assert len(policy._heap) < 200
    assert len(drain(policy)) == 4
