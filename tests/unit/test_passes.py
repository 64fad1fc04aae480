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
        assert len(one.rows) <= capacity.rows
        for row in one.rows:
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
    finals = [item.plan.request_id for item in work if item.plan.is_final]
    assert [row.request_id for row in passes[-1].rows if row.is_request] == finals
    assert not any(row.is_request for one in passes[:-1] for row in one.rows)
    if len(passes) == 1:
        assert passes[0].num_tokens <= last.tokens and len(passes[0].rows) <= last.rows
    for one in passes[:-1]:
        assert one.num_tokens <= capacity.tokens and len(one.rows) <= capacity.rows
    rows = [row for one in passes for row in one.rows if row.num_scheduled > 1 or not row.is_request]
    # A request may depend on those before it: no row of a later one comes before a row of an earlier one.
    assert [row.request_id for row in rows] == sorted((row.request_id for row in rows), key=int)
    for item in work:
        mine = [row for row in rows if row.request_id == item.plan.request_id]
        assert [row.num_computed for row in mine] == sorted(row.num_computed for row in mine)
        computed = [(row.num_computed, row.num_computed + row.num_scheduled) for row in mine]
        computed += [
            (row.num_computed, len(row.token_ids))
            for row in passes[-1].rows
            if row.is_request and row.request_id == item.plan.request_id
        ]
        assert union(computed) == union(item.ranges)
        assert all(row.block_ids == item.plan.block_ids for row in mine)


def test_one_pass_where_everything_fits() -> None:
    step = make_step("r", 100)
    passes = recomputation_passes(
        [Recomputation(step, ((32, 40), (90, 100)))], Capacity(64, 4), Capacity(64, 4)
    )
    assert len(passes) == 1
    assert [(row.num_computed, row.num_scheduled, row.is_request) for row in passes[0].rows] == [
        (32, 8, False),
        (90, 10, True),
    ]


def test_nothing_to_recompute_is_one_empty_pass() -> None:
    assert [one.num_tokens for one in recomputation_passes([], Capacity(8, 8), Capacity(8, 8))] == [0]
