"""Eq. 4, Algorithm 1 and the selection strategies: properties for all inputs, and cases by hand."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.engine.selection import (
    MTAFS,
    STRATEGIES,
    SelectionSettings,
    allocate_budget,
    recomputed,
    register_strategy,
    select,
    select_none,
)
from daric_rag.engine.token_ranges import TokenRange, refine, subtract, total, union

mtafs = st.sampled_from(sorted(MTAFS))
ratios = st.floats(0.001, 0.999)
n_avgs = st.integers(1, 300)


def bounds_of(sizes: Sequence[int]) -> list[TokenRange]:
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


chunk_sizes = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=40)
prompts = chunk_sizes.filter(any).map(bounds_of)
settings_of_all_kinds = st.builds(
    SelectionSettings,
    strategy=st.sampled_from(sorted(STRATEGIES)),
    n_avg=n_avgs,
    ratio=ratios,
    mtaf=mtafs,
    max_fraction=st.none() | st.floats(0.001, 1),
)
range_lists = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def shares(num_chunks: int, n_avg: int, ratio: float, mtaf: str) -> list[int]:
    return allocate_budget(num_chunks, num_chunks * n_avg, ratio, mtaf)


def positions(ranges: Sequence[TokenRange]) -> set[int]:
    return {position for start, end in ranges for position in range(start, end)}


def assert_normal(ranges: Sequence[TokenRange]) -> None:
    """Sorted, non-empty, and separated by at least one token."""
    assert all(start < end for start, end in ranges)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(ranges))


# ---- Eq. 4


@given(st.integers(1, 400), n_avgs, ratios, mtafs)
@example(100_000, 32, 0.1, "exp")
@example(3, 100, 0.29, "linear")
def test_budget_adds_up_and_never_decreases(num_chunks: int, n_avg: int, ratio: float, mtaf: str) -> None:
    budget = shares(num_chunks, n_avg, ratio, mtaf)
    assert len(budget) == num_chunks
    assert sum(budget) == num_chunks * n_avg
    assert budget == sorted(budget)
    assert budget[0] >= 0


@given(st.integers(1, 200), n_avgs, ratios, mtafs)
@example(2, 32, 0.1, "linear")
def test_proposition_1_no_head_grows_with_more_chunks(
    num_chunks: int, n_avg: int, ratio: float, mtaf: str
) -> None:
    heads = shares(num_chunks, n_avg, ratio, mtaf)[:-1]
    heads_of_longer = shares(num_chunks + 1, n_avg, ratio, mtaf)[:-1]
    assert all(longer <= head for head, longer in zip(heads, heads_of_longer, strict=False))


@given(st.integers(3, 200), n_avgs, ratios, mtafs)
def test_budget_is_equation_4_rounded_down(num_chunks: int, n_avg: int, ratio: float, mtaf: str) -> None:
    *heads, window = shares(num_chunks, n_avg, ratio, mtaf)
    functions: dict[str, Callable[[int], float]] = {"linear": float, "log": math.log, "exp": math.exp}
    f = functions[mtaf]
    span = f(num_chunks) - f(2)
    # The conditions of Eq. 4 in unrounded numbers: n_2 = r * n_avg, n_M = n_l, the sum is M * n_avg.
    shape = [(f(i) - f(2)) / span for i in range(2, num_chunks + 1)]
    n_2 = ratio * n_avg
    n_l = n_2 + (num_chunks * n_avg - num_chunks * n_2) / (sum(shape) + 1)
    for head, share in zip(heads, shape, strict=True):
        assert n_2 + (n_l - n_2) * share - 1 - 1e-6 < head < n_2 + (n_l - n_2) * share + 1e-6
    assert n_l - 1e-6 <= window < n_l + num_chunks


@pytest.mark.parametrize(
    ("num_chunks", "n_avg", "ratio", "mtaf", "expected"),
    [
        (1, 32, 0.1, "linear", [32]),
        (2, 32, 0.1, "log", [32, 32]),
        # n_2 = 10, rise = 300 * 0.9 / (0 + 1 + 1) = 135 -> n_3 = n_l = 145
        (3, 100, 0.1, "linear", [10, 145, 145]),
        # n_2 = 4, rise = 5 * 36 / 3 = 60 over i = 2..5 (shares 0, 1/3, 2/3, 1)
        (5, 40, 0.1, "linear", [4, 24, 44, 64, 64]),
        # 0.29 * 100 is 28.999999999999996 in binary: it must count as 29
        (3, 100, 0.29, "linear", [29, 135, 136]),
    ],
)
def test_budget_by_hand(num_chunks: int, n_avg: int, ratio: float, mtaf: str, expected: list[int]) -> None:
    assert shares(num_chunks, n_avg, ratio, mtaf) == expected


def test_mtafs_differ_in_how_late_they_spend() -> None:
    log, linear, exp = (shares(12, 32, 0.1, mtaf) for mtaf in ("log", "linear", "exp"))
    assert log[5] > linear[5] > exp[5]
    assert log[-1] < linear[-1] < exp[-1]


# ---- select


@given(prompts, settings_of_all_kinds)
def test_index_set_properties(chunks: list[TokenRange], settings: SelectionSettings) -> None:
    num_tokens = chunks[-1][1]
    ranges = select(chunks, settings)
    assert_normal(ranges)
    assert ranges[0][0] >= 0
    assert ranges[-1][1] == num_tokens
    if settings.strategy == "all":
        assert ranges == [(0, num_tokens)]
        return
    assert total(ranges) <= len(chunks) * settings.n_avg
    if settings.max_fraction is not None:
        assert total(ranges) <= max(1, settings.max_fraction * num_tokens + 1e-6)
    end_of_first = next(end for _, end in chunks if end)
    assert all(start >= end_of_first for start, _ in ranges[:-1])


@given(prompts, n_avgs, ratios, mtafs)
def test_daric_contains_its_heads_and_its_window(
    chunks: list[TokenRange], n_avg: int, ratio: float, mtaf: str
) -> None:
    filled = [chunk for chunk in chunks if chunk[0] < chunk[1]]
    *heads, window = shares(len(filled), n_avg, ratio, mtaf)
    chosen = positions(select(chunks, SelectionSettings("daric", n_avg, ratio, mtaf)))
    for (start, end), head in zip(filled[1:], heads, strict=True):
        assert chosen >= set(range(start, min(start + head, end)))
    num_tokens = chunks[-1][1]
    assert chosen >= set(range(max(0, num_tokens - window), num_tokens))


@given(st.lists(st.integers(400, 600), min_size=2, max_size=12), st.integers(1, 32), ratios, mtafs)
def test_daric_spends_the_whole_budget_when_it_fits(
    sizes: list[int], n_avg: int, ratio: float, mtaf: str
) -> None:
    ranges = select(bounds_of(sizes), SelectionSettings("daric", n_avg, ratio, mtaf))
    assert total(ranges) == len(sizes) * n_avg


def test_daric_by_hand() -> None:
    chunks = bounds_of([100, 100, 100, 100, 200])
    assert select(chunks, SelectionSettings("daric", n_avg=40)) == [
        (100, 104),
        (200, 224),
        (300, 344),
        (400, 464),
        (536, 600),
    ]


def test_daric_gives_tokens_of_short_chunks_to_the_window() -> None:
    # The budget is 4 + 24 + 44 + 64 + 64. Chunk 3 has 10 tokens, so 14 go to the window: 64 + 14 = 78.
    chunks = bounds_of([100, 100, 10, 100, 200])
    assert select(chunks, SelectionSettings("daric", n_avg=40)) == [
        (100, 104),
        (200, 254),  # chunk 3 whole, then the 44 head tokens of chunk 4
        (310, 374),
        (432, 510),
    ]


def test_daric_compensates_again_when_the_window_grows_into_a_head() -> None:
    # Chunk 5 lies within the window: 64 tokens lost. The window grows over all of chunk 5 into chunk 4 and
    # meets its head, which loses tokens once more.
    chunks = bounds_of([100, 100, 100, 60, 64])
    ranges = select(chunks, SelectionSettings("daric", n_avg=40))
    assert ranges == [(100, 104), (200, 224), (252, 424)]
    assert total(ranges) == 200


def test_daric_stops_after_three_rounds() -> None:
    # Heads of 9 of 10 tokens: what the window gains in a round is mostly head already, round after round.
    chunks = bounds_of([10] * 20)
    ranges = select(chunks, SelectionSettings("daric", n_avg=9, ratio=0.99))
    assert total(ranges) < 20 * 9
    assert ranges[-1][0] > 10


def test_epic_takes_the_same_head_of_every_chunk_but_the_first() -> None:
    chunks = bounds_of([50, 50, 4, 50])
    assert select(chunks, SelectionSettings("epic", n_avg=8)) == [(50, 58), (100, 112), (153, 154)]


def test_none_computes_only_the_last_token() -> None:
    assert select(bounds_of([5, 5]), SelectionSettings("none")) == [(9, 10)]


def test_cap_lowers_the_budget() -> None:
    chunks = bounds_of([100] * 10)
    assert total(select(chunks, SelectionSettings(n_avg=50))) == 500
    assert total(select(chunks, SelectionSettings(n_avg=50, max_fraction=0.2))) == 200
    assert total(select(chunks, SelectionSettings("epic", n_avg=50, max_fraction=0.2))) == 9 * 22 + 1
    assert total(select(chunks, SelectionSettings(n_avg=10, max_fraction=0.2))) == 100


def test_all_but_the_first_chunk_is_recomputed_of_what_was_chosen() -> None:
    chunks = bounds_of([0, 10, 10])
    assert recomputed(chunks, SelectionSettings(n_avg=8)) == [(10, 20)]
    assert recomputed(bounds_of([10]), SelectionSettings(n_avg=8)) == [(9, 10)]
    assert recomputed(chunks, SelectionSettings("all")) == [(0, 20)]


# ---- strategies of one's own


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    for name in ("second-chunk", "bad"):
        monkeypatch.setitem(STRATEGIES, name, select_none)


def test_a_registered_strategy_is_selected_by_its_name(registry: None) -> None:
    for number in (1, 2):  # may be registered again
        register_strategy(
            "second-chunk", lambda bounds, settings, n=number: [bounds[n], (0, 1), (-5, 2), (14, 99)]
        )  # type: ignore[misc]
        config = DaricConfig(selection="second-chunk").override(selection="second-chunk")
        ranges = select(bounds_of([5, 5, 5]), SelectionSettings(config.selection))
        assert ranges == ([(0, 2), (5, 10), (14, 15)] if number == 1 else [(0, 2), (10, 15)])
    with pytest.raises(ValueError, match="second-chunk"):
        DaricConfig(selection="third-chunk")


def _raises(bounds: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    "strategy",
    [
        _raises,
        lambda bounds, settings: None,
        lambda bounds, settings: 5,
        lambda bounds, settings: [(0.0, 5.0)],
        lambda bounds, settings: [(0, 1, 2)],
        lambda bounds, settings: [("a", "b")],
        lambda bounds, settings: [3],
        lambda bounds: [],
    ],
)
def test_a_strategy_that_fails_costs_no_more_than_its_gain(
    registry: None, caplog: pytest.LogCaptureFixture, strategy: Any
) -> None:
    register_strategy("bad", strategy)
    assert select(bounds_of([5, 5]), SelectionSettings("bad")) == [(0, 10)]
    assert "'bad' failed" in caplog.text


@pytest.mark.parametrize(
    ("name", "strategy"), [("", len), (5, len), ("all", len), ("mine", [(0, 1)]), ("mine", None)]
)
def test_what_cannot_be_a_strategy_is_refused(name: Any, strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"(name|strategy) is"):
        register_strategy(name, strategy)
    assert "mine" not in STRATEGIES


# ---- bad input


@pytest.mark.parametrize(
    "chunks", [[], [(0, 0)], [(1, 5)], [(0, 5), (6, 9)], [(0, 5), (4, 9)], [(0, 5), (5, 4)]]
)
def test_bad_chunk_bounds(chunks: list[TokenRange]) -> None:
    with pytest.raises(ValueError, match="chunk_bounds"):
        select(chunks, SelectionSettings())


# ---- ranges, against sets of positions


@given(range_lists, range_lists)
def test_union_and_subtract_are_set_operations(left: list[TokenRange], right: list[TokenRange]) -> None:
    both, difference = union(left, right), subtract(left, right)
    assert positions(both) == positions(left) | positions(right)
    assert positions(difference) == positions(left) - positions(right)
    assert_normal(both)
    assert_normal(difference)
    assert total(both) == len(positions(both))


@given(range_lists, st.integers(0, 70))
def test_refinement_drops_what_the_engine_has(ranges: list[TokenRange], num_hit_tokens: int) -> None:
    refined = refine(ranges, num_hit_tokens)
    assert positions(refined) == {p for p in positions(ranges) if p >= num_hit_tokens}
    assert_normal(refined)


def test_refinement_rejects_a_negative_hit() -> None:
    with pytest.raises(ValueError, match="num_hit_tokens is -1"):
        refine([(0, 1)], -1)
