"""The two phases of DARIC around vLLM's own forward pass (paper §3.4): rebuild_scheduler_output and execute.

`DaricCPUWorker` and `DaricGPUWorker` are vLLM's workers with `execute_model` run several times a step where reuse
needs it. This file and the connector are the places that know vLLM's internals:

- A sub-request is a new request of the model runner that the scheduler never sees. One that computes less than
  its prompt is a partial prefill: vLLM discards its sample. It is removed by naming it in the
  `finished_req_ids` of the next pass.
- After a pass whose samples are not wanted, `model_runner.execute_model_state = None` resets the runner.
- Decodes are in the last pass only: the model runner drops a request that is not in a pass from its batch, and
  takes it back from its own state. Not so with async scheduling: there the last token may live only on the device,
  and the runner would want the decode's whole text from the scheduler; so decodes are in every pass. Computing the
  same token twice writes the same KV.
- The scheduler expects an output for every request that it scheduled; one whose prompt goes on in the next step
  is in no pass, so an empty output is added for it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from daric_rag.engine.death_watch import watch_parent
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.connector import DaricConnector, DaricMetadata
from daric_rag.engine.scheduling.plan import StepPlan
from daric_rag.engine.worker.absent_requests import with_empty_outputs
from daric_rag.engine.worker.passes import Capacity, Pass, Row, generation_passes, recomputation_passes
from daric_rag.engine.worker.rope import rope_parameters_from_model
from daric_rag.engine.worker.scheduled_step import ScheduledStep
from daric_rag.engine.worker.self_check import check_against_prefill
from daric_rag.engine.worker.step_work import StepWork
from daric_rag.engine.worker.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput

_SUB_REQUEST_PARAMS = SamplingParams(temperature=0.0, max_tokens=1)
# Rows that the model runner has beside those that the scheduler may fill: however many requests are decoding, the
# ranges of a prefill still fit into one pass.
_ROWS_FOR_SUB_REQUESTS = 128


class _DaricWorkerMixin:
    """Runs a step of reuse as several passes of vLLM's own `execute_model`."""

    model_runner: Any
    vllm_config: Any

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        watch_parent()
        super().__init__(_with_more_rows(vllm_config), *args, **kwargs)  # type: ignore[call-arg]
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
        self._side().hooks.set_rope(self._rope)

    def compile_or_warm_up_model(self) -> Any:
        """Let vLLM warm up, then hold re-encoding against a full prefill (`self_check`)."""
        result = super().compile_or_warm_up_model()  # type: ignore[misc]
        model_config = self.vllm_config.model_config
        check_against_prefill(
            self._side().hooks,
            self._run_alone,
            block_size=self._block_size,
            vocab_size=model_config.get_vocab_size(),
            max_tokens=min(
                self.vllm_config.scheduler_config.max_num_batched_tokens, model_config.max_model_len
            ),
        )
        return result

    def _run_alone(self, row: Row) -> None:
        """Compute a sub-request in a forward pass of its own, outside any step."""
        empty = self._with_removals(SchedulerOutput.make_empty())
        request = self._sub_request(row)
        clock = self._side().hooks.stream.clock
        started = clock()
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
        self._side().measure_generation(row.num_scheduled, clock() - started)

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
        self._hold(scheduler_output, meta.plans)
        step = ScheduledStep(
            scheduler_output,
            meta.plans,
            decodes_in_every_pass=self.vllm_config.scheduler_config.async_scheduling,
        )
        side = self._side()
        with side.step(meta.plans) as work:
            output = self._run_phases(step, work, side)
            # A chunk that a read from disk turned out damaged is generated, and the second phase repeated.
            while work.give_up(side.hooks.take_damaged()):
                self.model_runner.execute_model_state = None
                output = self._run_phases(step, work, side)
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
        """Counters of this rank: its store, steps with reuse and their passes, requests in flight in the last step."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, DaricConnector)
        return {**self._side().stats(), "tracked_requests": connector.num_tracked}

    def daric_load_profile(self, path: str) -> str | None:
        """Correct chunks of the profile at `path` from now on; what is wrong if it does not fit this rank."""
        try:
            self._side().load_profile(path)
        except ValueError as error:
            return str(error)  # an exception would reach the caller without its type
        return None

    def daric_begin_calibration(self) -> None:
        """Watch calibration requests from now on."""
        self._side().begin_calibration()

    def daric_end_calibration(self, directory: str | None) -> dict[str, Any]:
        """Stop watching; fit, write this rank's maps into `directory` and say what they gain. None: write nothing."""
        return self._side().end_calibration(directory)

    # ---- the phases ----

    def _run_phases(self, step: ScheduledStep, work: StepWork, side: WorkerSide) -> Any:
        """Cache generation, then partial recomputation; the output is that of the last pass."""
        config = self.vllm_config.scheduler_config
        whole = Capacity(config.max_num_batched_tokens, config.max_num_seqs)
        beside = whole.less(*step.load(is_last=False))
        clock = side.hooks.stream.clock
        started = clock()
        while work.generations:
            for one in generation_passes(work.take_generations(), beside, self._block_size):
                pass_started = clock()
                with side.hooks.generation(work, one):
                    self._forward_and_discard(step, one)
                side.measure_generation(one.num_tokens, clock() - pass_started)
            if work.repeats:
                side.hooks.publish_saves(work.store)
            work.load_repeats()
        generated = clock()
        passes = recomputation_passes(work.recomputations, beside, whole.less(*step.load(is_last=True)))
        for number, one in enumerate(passes, 1):
            with side.hooks.recomputation(work, one, is_first=number == 1):
                output = self._recompute(step, one, is_last=number == len(passes))
        recompute_s = clock() - generated
        for report in work.reports.values():
            report.add(RequestReport(generate_s=generated - started, recompute_s=recompute_s))
        return output

    def _recompute(self, step: ScheduledStep, one: Pass, *, is_last: bool) -> Any:
        if not is_last:
            return self._forward_and_discard(step, one)
        rebuilt = self._rebuild(step, one, is_last=True)
        if not rebuilt.total_num_scheduled_tokens:
            self._side().hooks.load_without_forward()
        self._side().num_passes += 1
        return self._forward(rebuilt)

    def _forward_and_discard(self, step: ScheduledStep, one: Pass) -> None:
        self._forward(self._rebuild(step, one, is_last=False))
        self._side().num_passes += 1
        self.model_runner.execute_model_state = None

    def _forward(self, scheduler_output: SchedulerOutput) -> Any:
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    @property
    def _block_size(self) -> int:
        return int(self.vllm_config.cache_config.block_size)

    def _side(self) -> WorkerSide:
        connector = get_kv_transfer_group()
        assert isinstance(connector, DaricConnector) and connector.worker_side is not None
        return connector.worker_side

    # ---- rebuild_scheduler_output ----

    def _rebuild(self, step: ScheduledStep, one: Pass, *, is_last: bool) -> SchedulerOutput:
        """The scheduler's output of one pass: its rows, and the requests without a plan that are in it."""
        finished = self._take_removals() | step.take_finished()
        new, cached = step.requests(is_last)
        scheduled = step.scheduled(is_last)
        for row in one.rows:
            if row.is_request:
                self._add_request(row, step, new, cached)
                scheduled[row.request_id] = row.num_scheduled
            else:
                sub_request = self._sub_request(row)
                new.append(sub_request)
                scheduled[sub_request.req_id] = row.num_scheduled
        return dataclasses.replace(
            step.original,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_req_ids=finished,
            has_sync_kv_loads=True,
            **step.take_once(),
        )

    def _sub_request(self, row: Row) -> NewRequestData:
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

    def _add_request(
        self, row: Row, step: ScheduledStep, new: list[NewRequestData], cached: CachedRequestData
    ) -> None:
        """Put the request itself into the pass: as new, or as resumed if the model runner knew it before."""
        request_id, blocks = row.request_id, (list(row.block_ids),)
        held = self._held.pop(request_id, None)
        is_announced = not step.announce(request_id)
        if held is not None:
            new.append(dataclasses.replace(held, block_ids=blocks, num_computed_tokens=row.num_computed))
            return
        cached.req_ids.append(request_id)
        if not is_announced:
            cached.resumed_req_ids.add(request_id)
        cached.new_block_ids.append(None if is_announced else blocks)
        cached.num_computed_tokens.append(row.num_computed)
        cached.num_output_tokens.append(step.num_output_tokens(request_id))
        cached.all_token_ids[request_id] = list(row.token_ids)

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
        return with_empty_outputs(output, absent)


def _with_more_rows(vllm_config: Any) -> Any:
    """vLLM's configuration as this worker sees it; the scheduler, perhaps in this process, keeps its own."""
    changed = copy.copy(vllm_config)
    changed.scheduler_config = copy.copy(vllm_config.scheduler_config)
    changed.scheduler_config.max_num_seqs += _ROWS_FOR_SUB_REQUESTS
    return changed


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class DaricCPUWorker(_DaricWorkerMixin, CPUWorker):
        """vLLM's CPU worker with the two phases of DARIC."""

else:
    from vllm.v1.worker.gpu_worker import Worker

    class DaricGPUWorker(_DaricWorkerMixin, Worker):
        """vLLM's GPU worker with the two phases of DARIC."""
