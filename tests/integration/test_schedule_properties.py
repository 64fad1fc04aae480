"""Under vLLM's real scheduler, whatever the arrivals: every block that a row reads was written before it is read.

The scheduler, its block pool, the connector, planning, sources and passes are the real ones. Only the forward pass
is not: a block holds for each of its slots which text ends there, and whether its key has its final position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daric_rag.config import DaricConfig
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY, ChunkLayout, StepPlan
from daric_rag.engine.selection import SelectionSettings
from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.store import KVStore
from daric_rag.engine.token_ranges import subtract
from daric_rag.engine.worker.passes import Capacity, Pass, generation_passes, recomputation_passes
from daric_rag.engine.worker.step_work import LoadedChunk, StepWork

pytestmark = pytest.mark.integration

BLOCK = 32
ROOT = b"r" * 32


@dataclass
class Cell:
    """One slot: the text that ends with its token, whether the key is at its final position, who wrote it, when."""

    text: int
    is_final: bool
    writer: str
    step: int


def texts(salt: object, token_ids: Sequence[int]) -> list[int]:
    """For every position a number that stands for the text up to and with it."""
    return list(accumulate(token_ids, lambda before, token: hash((before, token)), initial=hash(salt)))[1:]


class SymbolicWorker:
    """Executes the plans of a step pass by pass, and checks all that is read and written."""

    def __init__(self, capacity: Capacity, host_bytes: int) -> None:
        self.cells: dict[int, list[Cell | None]] = {}
        self.capacity = capacity
        self.store = KVStore(RecordSpec(1, 1, 1, "float32"), host_bytes=host_bytes, root=ROOT)
        self.step = 0
        self.prompts: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def allocated(self, request_id: str, table: Sequence[int], num_hit: int) -> None:
        """The request's block table of this step; blocks that it did not have and that are no hit are fresh."""
        known = set(self.tables.get(request_id, ()))
        for number, block in enumerate(table):
            if block not in known and number >= num_hit:
                self.cells[block] = [None] * BLOCK
        self.tables[request_id] = list(table)

    def write(
        self,
        name: str,
        table: Sequence[int],
        start: int,
        values: Sequence[int],
        *,
        is_final: bool,
        last: int = -1,
    ) -> None:
        for position, text in enumerate(values, start):
            block, slot = table[position // BLOCK], position % BLOCK
            before = self.cells[block][slot]
            # What another request filled in stays as it is; the last token is computed for its logits.
            assert before is None or (before.writer, before.step) == (name, self.step) or position == last, (
                f"{name} overwrites position {position} of block {block}, written by {before}"
            )
            self.cells[block][slot] = Cell(text, is_final, name, self.step)

    def read(self, name: str, table: Sequence[int], values: Sequence[int], *, is_final: bool) -> None:
        for position, text in enumerate(values):
            cell = self.cells[table[position // BLOCK]][position % BLOCK]
            assert cell is not None and (cell.text, cell.is_final) == (text, is_final), (
                f"{name} reads position {position} in block {table[position // BLOCK]}: {cell}"
            )

    def run(self, plans: Sequence[StepPlan], others: Sequence[tuple[str, int, int]]) -> StepWork:
        """`others`: requests without a plan with the range that they compute."""
        self.step += 1
        with StepWork(plans, self.store, 1, agree=list) as work:
            while work.generations:
                for one in generation_passes(work.take_generations(), self.capacity, BLOCK):
                    self._generate(work, one)
                work.load_repeats()
            passes = recomputation_passes(work.recomputations, self.capacity, self.capacity)
            for number, one in enumerate(passes):
                if number == 0:
                    recomputed = {item.plan.request_id: item.ranges for item in work.recomputations}
                    for loaded in work.loads:
                        self._load(loaded, recomputed.get(loaded.plan.request_id, ()))
                self._recompute(one, others if number == len(passes) - 1 else ())
        assert self.store.stats().pins == 0
        return work

    def _generate(self, work: StepWork, one: Pass) -> None:
        for loaded in work.prefixes:
            if any(generation.chunk is loaded.chunk for generation in one.starts):
                plan, chunk = loaded.plan, loaded.chunk
                end = chunk.segments[len(loaded.handles) - 1].end
                values = texts(ROOT, plan.token_ids[chunk.start : chunk.start + end])
                self.write(plan.request_id, plan.block_ids[chunk.start // BLOCK :], 0, values, is_final=False)
        for row in one.rows:
            values = texts(ROOT, row.token_ids)
            end = row.num_computed + row.num_scheduled
            new = values[row.num_computed : end]
            self.write(row.request_id, row.block_ids, row.num_computed, new, is_final=False)
        for row in one.rows:
            values = texts(ROOT, row.token_ids)[: row.num_computed + row.num_scheduled]
            self.read(row.request_id, row.block_ids, values, is_final=False)
        for generation in one.completes:
            plan, chunk = generation.plan, generation.chunk
            for segment in chunk.segments:
                if segment.end > generation.num_loaded:
                    handle = self.store.reserve(segment.key, segment.parent, segment.num_tokens)
                    if handle is not None:
                        self.store.commit(handle)
            if not plan.warm:
                values = self.prompts[plan.request_id][chunk.start : chunk.end]
                self.write(plan.request_id, plan.block_ids, chunk.start, values, is_final=True)

    def _load(self, loaded: LoadedChunk, recomputed: Sequence[tuple[int, int]]) -> None:
        plan, chunk = loaded.plan, loaded.chunk
        if plan.warm:
            return
        for start, end in subtract([(chunk.write_from, chunk.end)], recomputed):
            values = self.prompts[plan.request_id][start:end]
            self.write(plan.request_id, plan.block_ids, start, values, is_final=True)

    def _recompute(self, one: Pass, others: Sequence[tuple[str, int, int]]) -> None:
        rows = [(row.request_id, row.num_computed, row.num_computed + row.num_scheduled) for row in one.rows]
        for name, start, end in [*rows, *others]:
            last = len(self.prompts[name]) - 1
            values = self.prompts[name][start:end]
            self.write(name, self.tables[name], start, values, is_final=True, last=last)
        for name, _, end in [*rows, *others]:
            self.read(name, self.tables[name], self.prompts[name][:end], is_final=True)


@dataclass
class Arrival:
    """A request of an example: when it comes, and when its caller leaves (None: never)."""

    step: int
    documents: list[int]
    query: int
    max_tokens: int
    strategy: str
    reuse: bool
    leaves: int | None


ARRIVALS = st.builds(
    Arrival,
    st.integers(0, 4),
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(0, 1),
    st.integers(1, 4),
    st.sampled_from(["daric", "daric", "epic", "none", "all"]),
    st.sampled_from([True, True, True, False]),
    st.one_of(st.none(), st.none(), st.integers(1, 9)),
)

# Blocks of the documents: some begin alike.
SIZES = (1, 3, 9, 4, 4)


def document(number: int) -> list[int]:
    shared = 64 if number in (3, 4) else 0
    return [7] * shared + [
        100 * (number + 1) + position % 90 for position in range(SIZES[number] * BLOCK - shared)
    ]


class Config:
    """vLLM's configuration, in what hypothesis can print."""

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.fixture(scope="module")
def vllm_config(tiny_model: str) -> Iterator[Config]:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs

    from daric_rag.engine.launch import _defaults, set_default_environment

    set_default_environment()
    arguments = {**_defaults(DaricConfig()), "model": tiny_model, "max_model_len": 2048}
    config = AsyncEngineArgs(**arguments).create_engine_config()
    with set_current_vllm_config(config):
        yield Config(config)


def make_scheduler(vllm_config: Any, budget: int, num_seqs: int, num_blocks: int, threshold: int) -> Any:
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = copy.copy(vllm_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = budget
    config.scheduler_config.max_num_seqs = num_seqs
    # With it a request is stopped inside a chunk in a step that admits others on its blocks.
    config.scheduler_config.long_prefill_token_threshold = threshold
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    kv_config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv_config, StructuredOutputManager(config), block_size=BLOCK)


def make_request(number: int, arrival: Arrival) -> Any:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    tokens, bounds = [], []
    for piece in [[5] * BLOCK, *map(document, arrival.documents), [9, 9, arrival.query, 9, 9]]:
        bounds.append((len(tokens), len(tokens) + len(piece)))
        tokens += piece
    sampling = SamplingParams(max_tokens=arrival.max_tokens, temperature=0.0, ignore_eos=True)
    salt = None
    if arrival.reuse:
        live = (False,) * (len(bounds) - 1) + (True,)
        layout = ChunkLayout.select(tuple(bounds), live, SelectionSettings(arrival.strategy, n_avg=8))
        sampling.extra_args = {EXTRA_ARGS_KEY: layout.to_extra_args()}
        salt = f"reuse-{arrival.strategy}"
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=tokens,
        sampling_params=sampling,
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def drive(scheduler: Any, worker: SymbolicWorker, arrivals: Sequence[Arrival]) -> Iterator[str]:
    """Run all requests to their end; yields the name of each that was preempted."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    from daric_rag.engine.scheduling.connector import DaricWorkerMetadata

    waiting = sorted(enumerate(arrivals), key=lambda item: item[1].step)
    requests: dict[str, Any] = {}
    for step in range(400):
        while waiting and waiting[0][1].step <= step:
            number, arrival = waiting.pop(0)
            request = make_request(number, arrival)
            requests[request.request_id] = request
            scheduler.add_request(request)
        for number, arrival in enumerate(arrivals):
            if (
                arrival.leaves is not None
                and arrival.step + arrival.leaves == step
                and f"r{number}" in requests
            ):
                scheduler.finish_requests([f"r{number}"], RequestStatus.FINISHED_ABORTED)
                requests.pop(f"r{number}", None)
        if not waiting and not scheduler.has_unfinished_requests():
            return
        output = scheduler.schedule()
        yield from output.preempted_req_ids or ()
        scheduled = output.num_scheduled_tokens
        side = scheduler.connector.scheduler_side
        plans = output.kv_connector_metadata.plans
        starting = {
            one.req_id for one in output.scheduled_new_reqs
        } | output.scheduled_cached_reqs.resumed_req_ids
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name in scheduled:
            tracked = side._tracked.get(name)
            hit = (tracked.l_gpu if tracked else computed[name]) // BLOCK if name in starting else 0
            if name in starting:
                worker.tables.pop(name, None)
            worker.allocated(name, scheduler.kv_cache_manager.get_block_ids(name)[0], hit)
            salt = requests[name].cache_salt
            worker.prompts[name] = texts(salt, requests[name].all_token_ids)
        planned = {plan.request_id for plan in plans}
        others = [
            (name, computed[name], computed[name] + n) for name, n in scheduled.items() if name not in planned
        ]
        work = worker.run(plans, others)
        ids = list(scheduled)
        sampled = [
            [11 + step % 7] if computed[name] + scheduled[name] >= requests[name].num_tokens else []
            for name in ids
        ]
        meta = DaricWorkerMetadata({0: work.missing}, {0: worker.store.drain_events()}, work.reports)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: number for number, name in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=meta),
        )
        scheduler.update_from_output(output, result)
    raise AssertionError("requests are left after 400 steps")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    arrivals=st.lists(ARRIVALS, min_size=2, max_size=7),
    budget=st.sampled_from([64, 100, 257, 400, 700, 2048]),
    num_seqs=st.integers(2, 6),
    num_blocks=st.sampled_from([48, 60, 90, 400]),
    threshold=st.sampled_from([0, 0, 96]),
    rows=st.integers(2, 40),
    host_kilobytes=st.sampled_from([1, 4, 1024]),
)
def test_every_block_is_written_before_it_is_read(
    vllm_config: Config,
    arrivals: list[Arrival],
    budget: int,
    num_seqs: int,
    num_blocks: int,
    threshold: int,
    rows: int,
    host_kilobytes: int,
) -> None:
    scheduler = make_scheduler(vllm_config.value, budget, num_seqs, num_blocks, threshold)
    worker = SymbolicWorker(Capacity(budget, rows), host_kilobytes << 10)
    for _ in drive(scheduler, worker, arrivals):
        pass
    side = scheduler.connector.scheduler_side
    assert (side.num_tracked, side.num_unfilled_blocks) == (0, 0)
    # vLLM's own null block is never free.
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_blocks - 1
