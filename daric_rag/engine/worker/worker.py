"""The two phases of DARIC around vLLM's own forward pass (paper §3.4): rebuild_scheduler_output and execute.

`DaricCPUWorker` and `DaricGPUWorker` are vLLM's workers with `execute_model` run several times a step where reuse
needs it. This file and the connector are the places that know vLLM's internals:

- A sub-request is a new request of the model runner that the scheduler never sees. One that computes less than
  its prompt is a partial prefill: vLLM discards its sample. It is removed by naming it in the
  `finished_req_ids` of the next pass.
- After a pass whose samples are not wanted, `model_runner.execute_model_state = None` resets the runner.
- Decodes ride in every pass. Computing the same token twice writes the same KV, and with async scheduling a
  decode that left the batch would lose its last token, which may live only on the device.
- The scheduler expects an output for every request that it scheduled; one whose prompt goes on in the next step
  is in no pass, so an empty output is added for it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, ModelRunnerOutput

from daric_rag.engine.scheduling.connector import DaricConnector, DaricMetadata
from daric_rag.engine.scheduling.plan import StepPlan
from daric_rag.engine.worker.passes import (
    Capacity,
    FinalRow,
    Pass,
    SubRequest,
    generation_passes,
    recomputation_passes,
)
from daric_rag.engine.worker.rope import rope_parameters_from_model
from daric_rag.engine.worker.self_check import check_against_prefill
from daric_rag.engine.worker.worker_side import StepWork, WorkerSide

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput

_SUB_REQUEST_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)


class _DaricWorkerMixin:
    """Runs a step of reuse as several passes of vLLM's own `execute_model`."""

    model_runner: Any
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sub_requests: set[str] = set()
        self._num_sub_requests = 0
        # Requests whose prefill spans steps: known to the scheduler, not yet to the model runner.
        self._held: dict[str, NewRequestData] = {}
        # Their adapters, until they end: a request that comes back after a preemption does not tell it again.
        self._adapters: dict[str, LoRARequest] = {}
        self._absent: list[str] = []
        # The output of a step without a forward pass: with async scheduling vLLM asks for samples all the same.
        self._without_forward: ModelRunnerOutput | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and refuse it if its keys cannot be re-encoded."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._rope = rope_parameters_from_model(self.model_runner.get_model())

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM make the KV caches and the connector, then tell our half what it must know."""
        super().initialize_from_config(*args, **kwargs)  # type: ignore[misc]
        self._side().set_rope(self._rope)

    def compile_or_warm_up_model(self) -> Any:
        """Let vLLM warm up, then hold re-encoding against a full prefill (`self_check`)."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        model_config = self.vllm_config.model_config
        check_against_prefill(
            self._side(),
            self._run_alone,
            block_size=self.vllm_config.cache_config.block_size,
            vocab_size=model_config.get_vocab_size(),
            max_tokens=min(
                self.vllm_config.scheduler_config.max_num_batched_tokens, model_config.max_model_len
            ),
        )
        return result

    def _run_alone(self, row: SubRequest) -> None:
        """Compute a sub-request in a forward pass of its own, outside any step."""
        empty = self._with_removals(SchedulerOutput.make_empty())
        request = self._sub_request(row)
        self._forward(
            dataclasses.replace(
                empty,
                scheduled_new_reqs=[request],
                num_scheduled_tokens={request.req_id: row.num_scheduled},
                total_num_scheduled_tokens=row.num_scheduled,
                kv_connector_metadata=DaricMetadata(),
            )
        )
        self.model_runner.execute_model_state = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run one step: vLLM's own pass if nothing is reused in it, else the two phases."""
        self._absent = []
        self._without_forward = None
        for request_id in scheduler_output.finished_req_ids:
            self._held.pop(request_id, None)
            self._adapters.pop(request_id, None)
        meta = scheduler_output.kv_connector_metadata
        if not isinstance(meta, DaricMetadata) or not meta.plans:
            return self._forward(self._with_removals(scheduler_output))
        side = self._side()
        self._hold(scheduler_output, meta.plans)
        work = side.begin_step(meta.plans)
        try:
            step = _Step(scheduler_output, meta.plans)
            output = self._run_phases(step, work, side)
            # A chunk that a read from disk turned out damaged is generated, and the second phase repeated.
            while side.give_up_damaged(work):
                self.model_runner.execute_model_state = None
                output = self._run_phases(step, work, side)
        finally:
            side.end_step(work)
        output = self._attach_metadata(output)
        if output is None:
            return None
        self._without_forward = self._complete(output)
        return self._without_forward

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Sample as vLLM does, and add what the scheduler expects for requests that were in no pass."""
        if self._without_forward is not None:
            return self._without_forward
        return self._complete(super().sample_tokens(grammar_output))  # type: ignore[misc]

    def daric_stats(self) -> dict[str, Any]:
        """Counters of this rank's store."""
        return dataclasses.asdict(self._side().stats())

    # ---- the phases ----

    def _run_phases(self, step: _Step, work: StepWork, side: WorkerSide) -> Any:
        scheduler_config = self.vllm_config.scheduler_config
        whole = Capacity(scheduler_config.max_num_batched_tokens, scheduler_config.max_num_seqs)
        free = whole.less(step.num_rider_tokens, step.num_riders)
        last = whole.less(step.num_other_tokens, step.num_others)
        block_size = self.vllm_config.cache_config.block_size
        generations, work.generations = work.generations, []
        first_phase = generation_passes(generations, free, block_size)
        second_phase = recomputation_passes(work.recomputations, free, last)

        started = time.perf_counter()
        for one in first_phase:
            side.prepare_generation(work, one.starts, one.completes)
            self._forward_and_discard(step, one)
            side.finish_pass()
        generated = time.perf_counter()
        load_s = 0.0
        output = None
        for number, one in enumerate(second_phase):
            if number == 0:
                side.prepare_recomputation(work)
            if number == len(second_phase) - 1:
                rebuilt = self._rebuild(step, one, is_last=True)
                if not rebuilt.total_num_scheduled_tokens:
                    side.load_without_forward()
                output = self._forward(rebuilt)
            else:
                self._forward_and_discard(step, one)
            load_s += side.finish_pass()
        self._tell_times(work, generated - started, time.perf_counter() - generated - load_s, load_s)
        return output

    @staticmethod
    def _tell_times(work: StepWork, generate_s: float, recompute_s: float, load_s: float) -> None:
        for report in work.reports.values():
            report.generate_s += generate_s
            report.recompute_s += recompute_s
            report.load_s += load_s

    def _forward_and_discard(self, step: _Step, one: Pass) -> None:
        self._forward(self._rebuild(step, one, is_last=False))
        self.model_runner.execute_model_state = None

    def _forward(self, scheduler_output: SchedulerOutput) -> Any:
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _side(self) -> WorkerSide:
        connector = get_kv_transfer_group()
        assert isinstance(connector, DaricConnector) and connector.worker_side is not None
        return connector.worker_side

    # ---- rebuild_scheduler_output ----

    def _rebuild(self, step: _Step, one: Pass, *, is_last: bool) -> SchedulerOutput:
        """The scheduler's output of one pass: its sub-requests, the decodes, and in the last pass all others."""
        finished = self._take_removals() | step.take_finished()
        new = [self._sub_request(row) for row in one.sub_requests]
        scheduled = {
            request.req_id: row.num_scheduled for request, row in zip(new, one.sub_requests, strict=True)
        }
        others, cached = step.requests(is_last)
        new += others
        if is_last:
            for row in one.finals:
                self._add_final(row, step, new, cached)
                scheduled[row.plan.request_id] = row.num_scheduled
        scheduled.update(step.scheduled(is_last))
        once = step.take_once()
        return dataclasses.replace(
            step.original,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=finished,
            has_sync_kv_loads=True,
            **once,
        )

    def _sub_request(self, row: SubRequest) -> NewRequestData:
        self._num_sub_requests += 1
        request_id = f"daric-sub-request-{self._num_sub_requests}"
        self._sub_requests.add(request_id)
        return NewRequestData(
            req_id=request_id,
            prompt_token_ids=list(row.token_ids),
            mm_features=[],
            sampling_params=_SUB_REQUEST_PARAMS,
            pooling_params=None,
            block_ids=(list(row.block_ids),),
            num_computed_tokens=row.num_computed,
            lora_request=self._adapters.get(row.request_id),
        )

    def _add_final(
        self, row: FinalRow, step: _Step, new: list[NewRequestData], cached: CachedRequestData
    ) -> None:
        """Put the request itself into the pass: as new, or as resumed if the model runner knew it before."""
        plan = row.plan
        blocks = (list(plan.block_ids),)
        held = self._held.pop(plan.request_id, None)
        is_known = step.tell(plan.request_id)
        if held is not None:
            new.append(dataclasses.replace(held, block_ids=blocks, num_computed_tokens=row.num_computed))
            return
        cached.req_ids.append(plan.request_id)
        if not is_known:
            cached.resumed_req_ids.add(plan.request_id)
        cached.new_block_ids.append(None if is_known else blocks)
        cached.num_computed_tokens.append(row.num_computed)
        cached.num_output_tokens.append(step.num_output_tokens(plan.request_id))
        cached.all_token_ids[plan.request_id] = list(plan.token_ids)

    def _hold(self, scheduler_output: SchedulerOutput, plans: Sequence[StepPlan]) -> None:
        """Keep new requests with reuse until their last step; note who will be in no pass of this one."""
        planned = {plan.request_id for plan in plans}
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id in planned:
                self._held[request.req_id] = request
                if request.lora_request is not None:
                    self._adapters[request.req_id] = request.lora_request
        self._absent = [plan.request_id for plan in plans if not plan.is_final]

    def _take_removals(self) -> set[str]:
        removed, self._sub_requests = self._sub_requests, set()
        return removed

    def _with_removals(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        if not self._sub_requests:
            return scheduler_output
        finished = scheduler_output.finished_req_ids | self._take_removals()
        return dataclasses.replace(scheduler_output, finished_req_ids=finished)

    # ---- outputs ----

    def _attach_metadata(self, output: Any) -> Any:
        """Send the step's report along with its output, or with the samples that are still to be drawn."""
        meta = get_kv_transfer_group().build_connector_worker_meta()
        if meta is None:
            return output
        if output is None:
            self.model_runner.kv_connector_output.kv_connector_worker_meta = meta
            return None
        # The output of a step without a forward pass may be vLLM's shared empty one.
        connector_output = KVConnectorOutput(kv_connector_worker_meta=meta)
        return dataclasses.replace(output, kv_connector_output=connector_output)

    def _complete(self, output: Any) -> Any:
        if not self._absent:
            return output
        absent, self._absent = self._absent, []
        if isinstance(output, AsyncModelRunnerOutput):
            return _CompletedAsyncOutput(output, absent)
        return _with_empty_outputs(output, absent)


class _CompletedAsyncOutput(AsyncModelRunnerOutput):
    """An output that is still being computed on the device, with empty outputs added once it is there."""

    def __init__(self, inner: AsyncModelRunnerOutput, absent: Sequence[str]) -> None:
        self._inner = inner
        self._absent = absent

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device, then add the empty outputs."""
        return _with_empty_outputs(self._inner.get_output(), self._absent)


def _with_empty_outputs(output: ModelRunnerOutput, absent: Iterable[str]) -> ModelRunnerOutput:
    req_ids, index = list(output.req_ids), dict(output.req_id_to_index)
    sampled = list(output.sampled_token_ids)
    for request_id in absent:
        index[request_id] = len(req_ids)
        req_ids.append(request_id)
        sampled.append([])
    return dataclasses.replace(output, req_ids=req_ids, req_id_to_index=index, sampled_token_ids=sampled)


class _Step:
    """The scheduler's output of one step, sorted into requests with reuse, decodes, and all others."""

    def __init__(self, original: SchedulerOutput, plans: Sequence[StepPlan]) -> None:
        self.original = original
        planned = {plan.request_id for plan in plans}
        self._other_new_requests = [
            request for request in original.scheduled_new_reqs if request.req_id not in planned
        ]
        cached = original.scheduled_cached_reqs
        self._others: list[int] = []
        self._riders: list[int] = []
        for position, request_id in enumerate(cached.req_ids):
            if request_id in planned:
                continue
            is_decode = cached.num_output_tokens[position] > 0 and request_id not in cached.resumed_req_ids
            (self._riders if is_decode else self._others).append(position)
        self._finished: set[str] = set(original.finished_req_ids)
        self._is_first = True
        # Requests whose state of this step the model runner has: blocks are announced once.
        self._told: set[str] = set()

    def _tokens(self, positions: Sequence[int]) -> int:
        cached, scheduled = self.original.scheduled_cached_reqs, self.original.num_scheduled_tokens
        return sum(scheduled[cached.req_ids[position]] for position in positions)

    @property
    def num_rider_tokens(self) -> int:
        """Tokens of the decodes, which ride in every pass."""
        return self._tokens(self._riders)

    @property
    def num_riders(self) -> int:
        """Rows of the decodes."""
        return len(self._riders)

    @property
    def num_other_tokens(self) -> int:
        """Tokens of all requests without reuse, which ride in the last pass."""
        scheduled = self.original.num_scheduled_tokens
        new = sum(scheduled[request.req_id] for request in self._other_new_requests)
        return new + self._tokens(self._others) + self.num_rider_tokens

    @property
    def num_others(self) -> int:
        """Rows of all requests without reuse."""
        return len(self._other_new_requests) + len(self._others) + self.num_riders

    def num_output_tokens(self, request_id: str) -> int:
        """Tokens that a request had generated: some, if it was resumed."""
        cached = self.original.scheduled_cached_reqs
        if request_id not in cached.req_ids:
            return 0
        return cached.num_output_tokens[cached.req_ids.index(request_id)]

    def tell(self, request_id: str) -> bool:
        """Note that the model runner is told of a request; whether it was before, in this step."""
        is_known = request_id in self._told
        self._told.add(request_id)
        return is_known

    def requests(self, is_last: bool) -> tuple[list[NewRequestData], CachedRequestData]:
        """The requests without reuse that are in a pass: those to be introduced, and those known."""
        source = self.original.scheduled_cached_reqs
        positions = self._riders + (self._others if is_last else [])
        ids = [source.req_ids[position] for position in positions]
        known = {request_id for request_id in ids if self.tell(request_id)}
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids={one for one in ids if one in source.resumed_req_ids and one not in known},
            new_token_ids=[source.new_token_ids[p] for p in positions] if source.new_token_ids else [],
            all_token_ids=dict(source.all_token_ids),
            new_block_ids=[
                None if one in known else source.new_block_ids[p]
                for one, p in zip(ids, positions, strict=True)
            ],
            num_computed_tokens=[source.num_computed_tokens[p] for p in positions],
            num_output_tokens=[source.num_output_tokens[p] for p in positions],
        )
        if not is_last:
            return [], cached
        new = []
        for request in self._other_new_requests:
            if not self.tell(request.req_id):
                new.append(request)
            else:  # the pass is repeated
                cached.req_ids.append(request.req_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(0)
        return new, cached

    def scheduled(self, is_last: bool) -> dict[str, int]:
        """Scheduled tokens of the requests without reuse that are in a pass."""
        source, counts = self.original.scheduled_cached_reqs, self.original.num_scheduled_tokens
        ids = [source.req_ids[p] for p in self._riders + (self._others if is_last else [])]
        if is_last:
            ids += [request.req_id for request in self._other_new_requests]
        return {request_id: counts[request_id] for request_id in ids}

    def take_finished(self) -> set[str]:
        """Requests that ended before this step; named once."""
        finished, self._finished = self._finished, set()
        return finished

    def take_once(self) -> dict[str, Any]:
        """Work on blocks that must happen before the first pass and never again."""
        if self._is_first:
            self._is_first = False
            return {}
        return {"new_block_ids_to_zero": None, "kv_cache_block_copies": None, "free_encoder_mm_hashes": []}


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class DaricCPUWorker(_DaricWorkerMixin, CPUWorker):
        """vLLM's CPU worker with the two phases of DARIC."""

else:
    from vllm.v1.worker.gpu_worker import Worker

    class DaricGPUWorker(_DaricWorkerMixin, Worker):
        """vLLM's GPU worker with the two phases of DARIC."""
