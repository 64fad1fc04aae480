"""Cutting a step's work into forward passes that fit the model runner. Pure logic.

A *sub-request* is a row of the batch that does not exist for vLLM's scheduler. In the cache-generation phase it
is a missing chunk on its own, at positions from 0; in the partial-recomputation phase it is one range of the
recomputation index set, with the whole prompt before it. The last range of a prompt is the request itself, from
which vLLM samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daric_rag.engine.scheduling.plan import ChunkWork, StepPlan
from daric_rag.engine.token_ranges import TokenRange


@dataclass(frozen=True)
class Generation:
    """A chunk to generate in the cache-generation phase; its first `num_loaded` tokens come from the store."""

    plan: StepPlan
    chunk: ChunkWork
    num_loaded: int


@dataclass(frozen=True)
class Recomputation:
    """A request's part in the partial-recomputation phase: sorted, disjoint ranges."""

    plan: StepPlan
    ranges: tuple[TokenRange, ...]


@dataclass(frozen=True)
class Row:
    """Compute `num_scheduled` tokens of `token_ids` after `num_computed`, in the blocks `block_ids`.

    `request_id`: the request that it works for, whose LoRA adapter it uses. `is_request`: it is that request
    itself, and computes its last token; otherwise it is a sub-request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed: int
    num_scheduled: int
    is_request: bool = False


@dataclass(frozen=True)
class Pass:
    """One forward pass. `starts` and `completes`: chunks whose generation begins and ends with this pass."""

    rows: tuple[Row, ...] = ()
    starts: tuple[Generation, ...] = ()
    completes: tuple[Generation, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the pass computes."""
        return sum(row.num_scheduled for row in self.rows)


@dataclass(frozen=True)
class Capacity:
    """What one pass can take: tokens and rows."""

    tokens: int
    rows: int

    def less(self, tokens: int, rows: int) -> Capacity:
        """What is left beside other requests; at least one token in one row."""
        return Capacity(max(1, self.tokens - tokens), max(1, self.rows - rows))


def generation_passes(generations: Sequence[Generation], capacity: Capacity, block_size: int) -> list[Pass]:
    """The cache-generation phase: one pass where everything fits, several in order where it does not."""
    packer = _Packer(capacity)
    for generation in generations:
        chunk, plan = generation.chunk, generation.plan
        tokens = plan.token_ids[chunk.start : chunk.end]
        first_block = chunk.start // block_size
        blocks = plan.block_ids[first_block : first_block + -(-len(tokens) // block_size)]
        position = generation.num_loaded
        while position < len(tokens):
            starts = position == generation.num_loaded
            size = packer.room(len(tokens) - position)
            row = Row(plan.request_id, tokens, blocks, position, size)
            position += size
            packer.add(row, generation if starts else None, generation if position == len(tokens) else None)
    return packer.passes()


def recomputation_passes(work: Sequence[Recomputation], capacity: Capacity, last: Capacity) -> list[Pass]:
    """The partial-recomputation phase; requests that reach their end are rows of the last pass.

    `last`: what the last pass can take beside the other requests in it. Requests come in the order in which they
    may depend on each other's blocks, and ranges in prompt order, so splitting keeps causality.
    """
    rows = [_row(item.plan, start, end) for item in work for start, end in item.ranges]
    everything = Pass(tuple(rows))
    if everything.num_tokens <= last.tokens and len(rows) <= last.rows:
        return [everything]
    packer = _Packer(capacity)
    for row in rows:
        start, end = row.num_computed, row.num_computed + row.num_scheduled
        while start < end:
            size = packer.room(end - start)
            packer.add(replace(row, num_computed=start, num_scheduled=size, is_request=False))
            start += size
    # The requests' last tokens once more: their KV is there already, only the logits are wanted.
    ends = (item.plan for item in work if item.plan.is_final)
    return [
        *packer.passes(),
        Pass(tuple(_row(plan, len(plan.token_ids) - 1, len(plan.token_ids)) for plan in ends)),
    ]


def _row(plan: StepPlan, start: int, end: int) -> Row:
    is_request = plan.is_final and end == len(plan.token_ids)
    return Row(plan.request_id, plan.token_ids, plan.block_ids, start, end - start, is_request)


class _Packer:
    """Fills passes in order; never puts a row into an earlier pass than the row before it."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._done: list[Pass] = []
        self._clear()

    def _clear(self) -> None:
        self._rows: list[Row] = []
        self._starts: list[Generation] = []
        self._completes: list[Generation] = []
        self._tokens = 0

    def room(self, wanted: int) -> int:
        """Tokens of the next row that fit, opening a new pass if none do."""
        if self._tokens >= self._capacity.tokens or len(self._rows) >= self._capacity.rows:
            self._close()
        return min(wanted, self._capacity.tokens - self._tokens)

    def add(self, row: Row, starts: Generation | None = None, completes: Generation | None = None) -> None:
        self._rows.append(row)
        self._tokens += row.num_scheduled
        if starts is not None:
            self._starts.append(starts)
        if completes is not None:
            self._completes.append(completes)

    def passes(self) -> list[Pass]:
        self._close()
        return self._done

    def _close(self) -> None:
        if self._rows:
            self._done.append(Pass(tuple(self._rows), tuple(self._starts), tuple(self._completes)))
        self._clear()
