"""Passes keep within the model runner's capacity, lose no token, and keep causal order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.keys import root_key, segment_chain
from daric_rag.engine.scheduling.plan import ChunkWork, StepPlan
from daric_rag.engine.token_ranges import TokenRange, union
from daric_rag.engine.worker.passes import (
    Capacity,
    Generation,
    Recomputation,
    generation_passes,
    recomputation_passes,
)

BLOCK = 32
ROOT = root_key({"model": "test"})


def make_step(name: str, num_tokens: int, chunks: tuple[ChunkWork, ...] = (), final: bool = True) -> StepPlan:
    blocks = tuple(range(1, 2 + num_tokens // BLOCK))
    return StepPlan(name, tuple(range(num_tokens)), blocks, chunks, (), (), final)


def make_chunk(start: int, end: int) -> ChunkWork:
    return ChunkWork(start, end, start, segment_chain(ROOT, range(start, end)), 0)


CAPACITIES = st.builds(Capacity, st.integers(1, 300), st.integers(1, 6))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 200)), min_size=1, max_size=6), CAPACITIES)
def test_generation_computes_each_missing_token_once(
    chunks: list[tuple[int, int]], capacity: Capacity
) -> None:
    generations, position = [], 0
    for blocks, loaded in chunks:
        chunk = make_chunk(position, position + blocks * BLOCK)
        position = chunk.end
        generations.append((chunk, min(loaded, blocks * BLOCK - 1)))
    plan = make_step("r", position, tuple(chunk for chunk, _ in generations))
    work = [Generation(plan, chunk, loaded) for chunk, loaded in generations]
    passes = generation_passes(work, capacity, BLOCK)
    computed: dict[int, list[TokenRange]] = {}
    for one in passes:
        assert 0 < one.num_tokens <= capacity.tokens
        assert len(one.sub_requests) <= capacity.rows
        for row in one.sub_requests:
            start = row.token_ids[0]
            computed.setdefault(start, []).append((row.num_computed, row.num_computed + row.num_scheduled))
            assert row.block_ids[0] == plan.block_ids[start // BLOCK]
            assert len(row.block_ids) * BLOCK == len(row.token_ids)
    for chunk, loaded in generations:
        pieces = computed[chunk.start]
        assert pieces == sorted(pieces)
        assert union(pieces) == [(loaded, chunk.end - chunk.start)]
        assert sum(end - start for start, end in pieces) == chunk.end - chunk.start - loaded
    assert [item for one in passes for item in one.completes] == work
    assert [item for one in passes for item in one.starts] == work


RANGES = st.lists(st.integers(0, 400), min_size=2, max_size=10, unique=True).map(
    lambda points: [
        (start, end) for start, end in zip(sorted(points)[::2], sorted(points)[1::2], strict=False)
    ]
)


@given(st.lists(st.tuples(RANGES, st.booleans()), min_size=1, max_size=5), CAPACITIES, CAPACITIES)
def test_recomputation_covers_all_ranges_in_order(
    requests: list[tuple[list[TokenRange], bool]], capacity: Capacity, last: Capacity
) -> None:
    work = []
    for number, (ranges, final) in enumerate(requests):
        num_tokens = ranges[-1][1] if final else 500
        work.append(Recomputation(make_step(str(number), num_tokens, final=final), tuple(ranges)))
    passes = recomputation_passes(work, capacity, last)
    finals = [item for item in work if item.plan.is_final]
    assert [row.plan for row in passes[-1].finals] == [item.plan for item in finals]
    assert all(not one.finals for one in passes[:-1])
    order = []
    for one in passes:
        if one is not passes[-1]:
            assert one.num_tokens <= capacity.tokens and len(one.sub_requests) <= capacity.rows
        order += [(id(row.block_ids), row.num_computed) for row in one.sub_requests]
    for item in work:
        mine = [position for blocks, position in order if blocks == id(item.plan.block_ids)]
        assert mine == sorted(mine)
        rows = [
            (row.num_computed, row.num_computed + row.num_scheduled)
            for one in passes
            for row in one.sub_requests
            if row.block_ids is item.plan.block_ids
        ]
        rows += [
            (row.num_computed, len(row.plan.token_ids)) for row in passes[-1].finals if row.plan is item.plan
        ]
        assert union(rows) == union(item.ranges)


def test_one_pass_where_everything_fits() -> None:
    step = make_step("r", 100)
    passes = recomputation_passes(
        [Recomputation(step, ((32, 40), (90, 100)))], Capacity(64, 4), Capacity(64, 4)
    )
    assert len(passes) == 1
    assert [row.num_scheduled for row in passes[0].sub_requests] == [8]
    assert passes[0].finals[0].num_computed == 90


def test_nothing_to_recompute_is_one_empty_pass() -> None:
    assert [one.num_tokens for one in recomputation_passes([], Capacity(8, 8), Capacity(8, 8))] == [0]
