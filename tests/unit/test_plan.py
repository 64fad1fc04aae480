"""Plans cover every token once, in order, whatever the steps and hits are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.keys import Tier, root_key
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.plan import ChunkLayout, RequestPlan, StepPlan, clip
from daric_rag.engine.scheduling.scheduler_side import ScheduledRequest, SchedulerSide
from daric_rag.engine.selection import SelectionSettings
from daric_rag.engine.storage.base import StoreEvent
from daric_rag.engine.token_ranges import total, union

BLOCK = 32
ROOT = root_key({"model": "test"})


def make_layout(sizes: list[int], live: list[bool], strategy: str = "daric") -> ChunkLayout:
    """Chunks of `sizes` blocks, the last one 5 tokens longer and live."""
    bounds, position = [], 0
    for number, size in enumerate(sizes):
        end = position + size * BLOCK + (5 if number == len(sizes) - 1 else 0)
        bounds.append((position, end))
        position = end
    flags = (*live[: len(sizes) - 1], True)
    return ChunkLayout.select(tuple(bounds), flags, SelectionSettings(strategy=strategy, n_avg=8))


LAYOUTS = st.builds(
    make_layout,
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.lists(st.booleans(), min_size=7, max_size=7),
    st.sampled_from(["daric", "epic", "none", "all"]),
)


def make_plan(layout: ChunkLayout, hit_depths: list[int]) -> RequestPlan:
    plan = RequestPlan.make("r", layout, range(layout.bounds[-1][1]), lambda profile: ROOT)
    depths = [min(depth, len(chain)) for depth, chain in zip(hit_depths, plan.chains(), strict=False)]
    plan.set_cached(depths)
    return plan


@given(LAYOUTS, st.lists(st.integers(0, 3), min_size=7, max_size=7), st.integers(0, 9), st.data())
def test_steps_cover_the_prompt(
    layout: ChunkLayout, depths: list[int], prefix_blocks: int, data: st.DataObject
) -> None:
    plan = make_plan(layout, depths)
    num_tokens = plan.num_tokens
    prefix = min(prefix_blocks * BLOCK, (num_tokens - 1) // BLOCK * BLOCK)
    plan.begin(prefix)
    steps: list[StepPlan] = []
    covered = prefix
    while covered < num_tokens:
        covered += data.draw(st.integers(1, num_tokens - covered))
        steps.append(plan.advance(covered, range(-(-covered // BLOCK))))
    assert [step.is_final for step in steps] == [False] * (len(steps) - 1) + [True]
    written = [(chunk.write_from, chunk.end) for step in steps for chunk in step.chunks]
    live = [piece for step in steps for piece in step.live]
    assert union(written, live) == [(prefix, num_tokens)]
    assert total(written) + total(live) == num_tokens - prefix
    recomputed = [piece for step in steps for piece in step.recompute]
    assert all(end <= start for (_, end), (start, _) in pairwise(recomputed))
    assert recomputed[-1][1] == num_tokens
    assert total(union(live, recomputed)) == total(recomputed)
    for step in steps:
        # A step touches nothing that has no blocks yet.
        blocks = len(step.block_ids) * BLOCK
        assert all(chunk.end <= blocks for chunk in step.chunks)
        assert all(end <= blocks for _, end in step.recompute)


@given(LAYOUTS, st.lists(st.integers(0, 3), min_size=7, max_size=7))
def test_contiguous_hit_is_an_unbroken_prefix(layout: ChunkLayout, depths: list[int]) -> None:
    plan = make_plan(layout, depths)
    hit = plan.num_contiguous_hit_tokens(BLOCK)
    assert hit % BLOCK == 0 and hit < plan.num_tokens
    broken = next((chunk.start for chunk in plan.chunks if not chunk.is_cached), plan.num_tokens - 1)
    assert hit == broken // BLOCK * BLOCK


def test_first_chunk_is_never_recomputed_unless_all() -> None:
    for strategy, first in (("daric", BLOCK * 2), ("epic", BLOCK * 2), ("all", 0)):
        plan = make_plan(make_layout([2, 3, 1], [False] * 3, strategy), [0, 0])
        plan.begin(0)
        assert plan.recompute[0][0] >= first


def test_generated_tokens_of_a_resumed_request_are_live() -> None:
    layout = make_layout([1, 2, 1], [False] * 3)
    end = layout.bounds[-1][1]
    plan = RequestPlan.make("r", layout, range(end + 7), lambda profile: ROOT)
    assert plan.chunks[-1].end == end + 7 and plan.chunks[-1].live
    cached_query = ChunkLayout(layout.bounds, (False,) * 3, layout.recompute)
    plan = RequestPlan.make("r", cached_query, range(end + 7), lambda profile: ROOT)
    assert [(chunk.start, chunk.end, chunk.live) for chunk in plan.chunks][-1] == (end, end + 7, True)


def test_layout_survives_its_travel() -> None:
    layout = make_layout([1, 2, 1], [False, True, False])
    values = layout.to_extra_args()
    assert ChunkLayout.from_extra_args(values, layout.bounds[-1][1], BLOCK) == layout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bounds": []}, "0 bounds"),
        ({"bounds": [[0, 32], [64, 133]]}, "starts at 32"),
        ({"bounds": [[0, 31], [31, 133]]}, "block boundary"),
        ({"bounds": [[0, 32], [32, 100]]}, "133 tokens"),
        ({"live": [True]}, "live flags"),
        ({"recompute": [[0, 134]]}, "not inside the prompt"),
        ({"recompute": [[-1, 5]]}, "not inside the prompt"),
        ({"recompute": [[5, 5]]}, "not inside the prompt"),
        ({"recompute": [[float("inf"), 5]]}, "malformed"),
        ({"recompute": [5]}, "malformed"),
        ({"bounds": "x"}, "malformed|not enough|invalid"),
        ({"recompute": None}, "malformed"),
    ],
)
def test_hostile_layouts_are_refused(change: dict[str, object], words: str) -> None:
    layout = ChunkLayout.select(((0, 32), (32, 133)), (False, True), SelectionSettings())
    with pytest.raises(ValueError, match=words):
        ChunkLayout.from_extra_args({**layout.to_extra_args(), **change}, 133, BLOCK)


def test_clip() -> None:
    assert clip([(0, 5), (7, 9), (12, 20)], (3, 13)) == [(3, 5), (7, 9), (12, 13)]


def scheduler() -> SchedulerSide:
    return SchedulerSide(MemoryIndex(), BLOCK)


def look_up(side: SchedulerSide, name: str, layout: ChunkLayout, prefix: int = 0) -> int:
    return side.num_external_tokens(name, layout, range(layout.bounds[-1][1]), prefix, lambda profile: ROOT)


def test_scheduler_side_reports_what_the_index_holds() -> None:
    side = scheduler()
    layout = make_layout([2, 10, 1], [False] * 3)
    assert look_up(side, "a", layout) == 0
    plan = RequestPlan.make("x", layout, range(layout.bounds[-1][1]), lambda profile: ROOT)
    segments = [segment for chunk in plan.chunks for segment in chunk.segments]
    events = [StoreEvent("added", segment.key, Tier.HOST) for segment in segments]
    side.apply([], events[:2])
    assert look_up(side, "b", layout) == 2 * BLOCK  # the second chunk lacks its second segment
    side.apply([], events[2:])
    assert look_up(side, "c", layout) == 12 * BLOCK
    assert look_up(side, "c", layout, prefix=5 * BLOCK) == 7 * BLOCK
    removed = segments[-1]
    side.apply([], [StoreEvent("removed", removed.key, Tier.HOST)])
    assert look_up(side, "d", layout) == 2 * BLOCK
    # What the store lacked is forgotten, unless it was stored since.
    side.apply([segments[0].key, segments[1].key], events[:1])
    assert look_up(side, "d", layout) == 2 * BLOCK
    side.apply([segments[0].key], [])
    assert look_up(side, "d", layout) == 0
    side.apply([], events[:1])
    assert side.index.lookup([[segments[0].key]]) == [1]
    for name in "abcd":
        side.finished(name)
    assert side.num_tracked == 0


def step(
    side: SchedulerSide, name: str, blocks: list[int], covered: int, computed: int = 0, *, starts: bool = True
) -> StepPlan:
    scheduled = ScheduledRequest(name, computed, covered - computed, starts)
    (plan,) = side.plan([scheduled], lambda _: blocks)
    return plan


FIRST_BLOCKS = list(range(100, 106))
"""What a request holds that is stopped in the middle of the second chunk of `LAYOUT`."""
LAYOUT = make_layout([1, 8, 1], [False] * 3)


def stopped_in_a_chunk() -> SchedulerSide:
    side = scheduler()
    look_up(side, "first", LAYOUT)
    first = step(side, "first", FIRST_BLOCKS, 6 * BLOCK)
    assert not first.is_final and first.chunks[-1].end == BLOCK
    return side


def test_unfilled_blocks_of_another_request_are_not_trusted() -> None:
    side = stopped_in_a_chunk()
    assert side.num_unfilled_blocks == 5
    look_up(side, "second", LAYOUT, prefix=6 * BLOCK)
    second = step(side, "second", [*FIRST_BLOCKS, 200, 201, 202, 203, 204], LAYOUT.bounds[-1][1])
    assert second.chunks[0].write_from == BLOCK


def test_blocks_that_another_request_filled_are_not_filled_again() -> None:
    side = stopped_in_a_chunk()
    look_up(side, "second", LAYOUT, prefix=6 * BLOCK)
    step(side, "second", [*FIRST_BLOCKS, 200, 201, 202, 203, 204], LAYOUT.bounds[-1][1])
    assert side.num_unfilled_blocks == 0
    mine = [*FIRST_BLOCKS, 300, 301, 302, 303, 304]
    first = step(side, "first", mine, LAYOUT.bounds[-1][1], 6 * BLOCK, starts=False)
    # The chunk's beginning is there, so its rest is all that is left to write.
    assert [(chunk.start, chunk.write_from) for chunk in first.chunks] == [(BLOCK, 6 * BLOCK)]
    assert first.recompute[0][0] >= 6 * BLOCK
    values, orphans = side.finished("first")
    assert values is not None and values["engine_hit_tokens"] == 5 * BLOCK
    assert orphans == []


def test_a_request_scheduled_later_in_a_step_trusts_what_an_earlier_one_fills() -> None:
    side = stopped_in_a_chunk()
    end = LAYOUT.bounds[-1][1]
    look_up(side, "second", LAYOUT, prefix=6 * BLOCK)
    tables = {
        "first": [*FIRST_BLOCKS, 300, 301, 302, 303, 304],
        "second": [*FIRST_BLOCKS, 200, 201, 202, 203, 204],
    }
    first, second = side.plan(
        [
            ScheduledRequest("first", 6 * BLOCK, end - 6 * BLOCK, False),
            ScheduledRequest("second", 6 * BLOCK, end - 6 * BLOCK, True),
        ],
        tables.__getitem__,
    )
    assert first.chunks[0].write_from == BLOCK
    assert second.chunks[0].write_from == 6 * BLOCK


def test_blocks_nobody_will_fill_are_named() -> None:
    side = stopped_in_a_chunk()
    look_up(side, "second", LAYOUT, prefix=6 * BLOCK)
    second = step(side, "second", [*FIRST_BLOCKS[:6], 200], 6 * BLOCK + 1)
    assert not second.is_final
    assert side.finished("first")[1] == []  # the second one is going to fill them
    assert side.preempted("second") == [*FIRST_BLOCKS[1:], 200]
    assert side.num_unfilled_blocks == 0


def test_the_last_token_is_computed_even_if_its_block_is_filled() -> None:
    side = scheduler()
    layout = ChunkLayout.select(((0, 64), (64, 128)), (False, False), SelectionSettings(strategy="none"))
    look_up(side, "first", layout)
    step(side, "first", [1, 2, 3, 4], 127)
    longer = ChunkLayout(((0, 64), (64, 128), (128, 133)), (False, False, True), layout.recompute)
    look_up(side, "second", longer, prefix=96)
    step(side, "second", [1, 2, 3, 4, 5], 133)
    last = step(side, "first", [1, 2, 3, 4], 128, 127, starts=False)
    assert last.is_final and last.recompute == ((127, 128),)
    assert [chunk.write_from for chunk in last.chunks] == [127]


def test_a_waiting_request_is_hashed_once_and_looked_up_when_the_index_changed() -> None:
    class Counting(MemoryIndex):
        lookups = 0

        def lookup(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
            self.lookups += 1
            return super().lookup(chains)

    index = Counting()
    side = SchedulerSide(index, BLOCK)
    for _ in range(3):
        assert look_up(side, "r", LAYOUT) == 0
    assert index.lookups == 1
    segment = (
        RequestPlan.make("x", LAYOUT, range(LAYOUT.bounds[-1][1]), lambda profile: ROOT).chunks[0].segments[0]
    )
    side.apply([], [StoreEvent("added", segment.key, Tier.HOST)])
    assert look_up(side, "r", LAYOUT) == BLOCK
    assert index.lookups == 2
