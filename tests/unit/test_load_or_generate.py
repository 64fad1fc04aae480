"""What is read and what is computed anew, for disks of any speed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.worker.load_or_generate import MIN_GAIN_S, Rate, num_worth_loading

CHUNKS = st.lists(st.integers(1, 2000), min_size=0, max_size=12)


@given(CHUNKS, st.integers(0, 5000), st.floats(1.0, 1e10), st.floats(1.0, 1e6))
def test_the_phase_is_never_longer_than_by_reading_or_generating_all(
    tokens: list[int], generated: int, bytes_per_s: float, tokens_per_s: float
) -> None:
    nbytes = [46_080 * count for count in tokens]
    number = num_worth_loading(nbytes, tokens, generated, bytes_per_s, tokens_per_s)

    def phase(loaded: int) -> float:
        return max(sum(nbytes[:loaded]) / bytes_per_s, (generated + sum(tokens[loaded:])) / tokens_per_s)

    assert 0 <= number <= len(tokens)
    shortest = min(map(phase, range(len(tokens) + 1)))
    assert phase(number) <= shortest + MIN_GAIN_S
    # Either it is as short as can be, or all are read because that is hardly longer.
    assert phase(number) == pytest.approx(shortest) or number == len(tokens)


@pytest.mark.parametrize(
    ("bytes_per_s", "tokens_per_s", "generated", "expected"),
    [
        (1e9, 100.0, 0, 4),  # a fast disk
        (1e3, 1e6, 0, 0),  # a stalled one
        (4e5, 100.0, 0, 2),  # as fast as the computation: half each
        (4e5, 100.0, 10_000, 4),  # there is more to generate than to read anyway
    ],
)
def test_chunks_from_the_first_are_read(
    bytes_per_s: float, tokens_per_s: float, generated: int, expected: int
) -> None:
    assert num_worth_loading([4000 * 100] * 4, [100] * 4, generated, bytes_per_s, tokens_per_s) == expected


def test_a_rate_follows_the_last_measurements() -> None:
    rate = Rate()
    assert rate.value() is None
    rate.add(100, 1)
    assert rate.value() == 100
    for _ in range(10):
        rate.add(300, 1)
    assert rate.value() == pytest.approx(300, rel=0.01)
