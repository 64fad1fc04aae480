"""`DaricConnector`: vLLM's KV connector interface, delegating to the scheduler's and the worker's half."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from daric_rag.config import DaricConfig
from daric_rag.engine.death_watch import watch_parent
from daric_rag.engine.fingerprint import adapter_fingerprint, root_fields
from daric_rag.engine.keys import SegmentKey, root_key
from daric_rag.engine.launch import CONFIG_KEY
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.approximate_blocks import ApproximateBlocks, PrefixHit
from daric_rag.engine.scheduling.index.opening import open_index
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY, ChunkLayout, StepPlan
from daric_rag.engine.scheduling.rank_copies import RankCopies
from daric_rag.engine.scheduling.scheduler_side import ScheduledRequest, SchedulerSide
from daric_rag.engine.storage.base import StoreEvent
from daric_rag.engine.worker.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class DaricMetadata(KVConnectorMetadata):
    """Scheduler to worker, every step: the reuse plans of requests that are in their prefill, in order."""

    plans: tuple[StepPlan, ...] = ()
    num_tracked: int = 0
    """Requests with reuse that the scheduler's side follows; told to the worker so that `daric_stats` can tell it."""


@dataclass
class DaricWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler, every step: what became of requests' tokens, and by rank what its store lacked and did.

    The reports tell what all ranks did together; their seconds are those of the first.
    """

    missing: dict[int, list[SegmentKey]]
    events: dict[int, list[StoreEvent]]
    reports: dict[str, RequestReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """What all ranks tell."""
        assert isinstance(other, DaricWorkerMetadata)
        return DaricWorkerMetadata(
            self.missing | other.missing, self.events | other.events, other.reports | self.reports
        )


class DaricConnector(KVConnectorBase_V1):
    """The public extension point through which vLLM calls us; all decisions are made elsewhere."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        watch_parent()
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._config = DaricConfig(**extra[CONFIG_KEY])
        self._block_size = vllm_config.cache_config.block_size
        self._fields = root_fields(vllm_config, self._config)
        self._roots: dict[tuple[str, str, str], bytes] = {}
        self._adapters: dict[tuple[str, str], str] = {}
        self._pool: BlockPool | None = None
        self._layouts: dict[str, ChunkLayout | None] = {}
        self._approximate = ApproximateBlocks(self._block_size)
        self.num_tracked = 0
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            num_ranks = vllm_config.parallel_config.tensor_parallel_size
            index = open_index(self._config, self._root("", "", ""), num_ranks)
            self.scheduler_side = SchedulerSide(index, self._block_size)
            self._copies = RankCopies(vllm_config.parallel_config.tensor_parallel_size)
        else:
            self.worker_side = WorkerSide(vllm_config, self._config, self._root("", "", ""))

    @property
    def requires_kv_delivery(self) -> bool:
        """We are a cache, not a prefill/decode hand-off."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """The layer-wise hooks do not run inside full CUDA graphs."""
        return True

    def _root(self, namespace: str, adapter: str, profile: str) -> bytes:
        name = (namespace, adapter, profile)
        if name not in self._roots:
            fields = {**self._fields, "namespace": namespace, "adapter": adapter, "profile": profile}
            self._roots[name] = root_key(fields)
        return self._roots[name]

    # ---- scheduler side ----

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self.scheduler_side is not None
        return self.scheduler_side

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Needed to take half-filled blocks out of the engine's prefix cache."""
        self._pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """max(0, L_cont - L_gpu): contiguous hits beyond the engine's own prefix hit, loaded in the same step."""
        if request.request_id not in self._layouts:
            self._layouts[request.request_id] = self._layout(request)
        layout = self._layouts[request.request_id]
        if layout is None:
            return 0, False
        hit = PrefixHit(layout, num_computed_tokens, request.block_hashes)
        misleading = self._approximate.arrives(request.request_id, hit, self._cached_block)
        if misleading:
            # Without them in the prefix cache, vLLM finds a shorter hit when it asks again in the next step.
            self._forget_blocks(misleading)
            return None, False
        external = self._scheduler.num_external_tokens(
            request.request_id,
            layout,
            request.all_token_ids,
            num_computed_tokens,
            functools.partial(self._root, layout.namespace, self._adapter(request)),
        )
        return external, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing to do: plans are made once the step is known, in `build_connector_meta`."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan this step for every request that is in its prefill with reuse."""
        for request_id in scheduler_output.preempted_req_ids or ():
            self._forget_blocks(self._scheduler.preempted(request_id))
        self._scheduler.next_step()
        state = scheduler_output.kv_connector_block_state

        def block_table(request_id: str) -> Sequence[int]:
            groups = state.get_block_ids(request_id) if state is not None else None
            assert groups is not None
            return groups[0]

        plans = self._scheduler.plan(_scheduled(scheduler_output), block_table)
        for plan in plans:
            self._approximate.allocated(plan.request_id, plan.block_ids)
        return DaricMetadata(plans, self._scheduler.num_tracked)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Bring the index up to date."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, DaricWorkerMetadata):
            self._scheduler.apply(*self._copies.merge(meta.missing, meta.events))
            self._scheduler.add_reports(meta.reports)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return the request's metrics with its last output; its blocks are free at once."""
        self._layouts.pop(request.request_id, None)
        self._approximate.finished(request.request_id)
        values, orphans = self._scheduler.finished(request.request_id)
        self._forget_blocks(orphans)
        return False, None if values is None else {EXTRA_ARGS_KEY: values}

    def _cached_block(self, block_hash: Any) -> int | None:
        """The block that vLLM's prefix cache has for a hash."""
        assert self._pool is not None
        blocks = self._pool.get_cached_block(block_hash, [0])
        return blocks[0].block_id if blocks else None

    def _forget_blocks(self, block_ids: Collection[int]) -> None:
        """Take blocks out of vLLM's prefix cache that others must not find: of approximate KV under live text, or
        allocated but never filled in.

        vLLM enters blocks when it schedules them. A reuse request that is aborted or preempted between two
        steps of a chunked prefill may leave a chunk half done.
        """
        if block_ids and self._pool is not None:
            self._pool.evict_blocks(set(block_ids))

    def _adapter(self, request: Request) -> str:
        """What stands for the request's LoRA adapter in its keys; "" for none."""
        lora = request.lora_request
        if lora is None:
            return ""
        name = (lora.lora_name, lora.lora_path)
        if name not in self._adapters or lora.load_inplace:
            self._adapters[name] = adapter_fingerprint(*name)
        return self._adapters[name]

    def _layout(self, request: Request) -> ChunkLayout | None:
        params = request.sampling_params
        if params is None or not params.extra_args or EXTRA_ARGS_KEY not in params.extra_args:
            return None
        values = params.extra_args[EXTRA_ARGS_KEY]
        try:
            self._adapter(request)
            return ChunkLayout.from_extra_args(values, request.num_prompt_tokens, self._block_size)
        except ValueError as error:
            logger.warning("request %s is served without reuse: %s", request.request_id, error)
            return None

    # ---- worker side ----

    @property
    def _worker(self) -> WorkerSide:
        assert self.worker_side is not None
        return self.worker_side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plans; they are executed by the worker around its forward passes."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, DaricMetadata):
            self.num_tracked = connector_metadata.num_tracked

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn the block layout and open the store."""
        self._worker.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Start what the worker prepared before the pass."""
        self._worker.hooks.start_pass()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Write the loaded chunks of one layer into their blocks, just before its attention reads them."""
        self._worker.hooks.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Save one layer of the chunks that were generated in this pass, then re-encode their keys."""
        self._worker.hooks.after_layer(layer_name)

    def wait_for_save(self) -> None:
        """Saves are complete when `save_kv_layer` returns."""

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Tell the scheduler's side what was stored, moved and evicted, and what became of requests' tokens.

        vLLM calls this inside every forward pass; a step of several passes is told as a whole at its end.
        """
        if self._worker.in_step:
            return None
        side = self._worker
        missing, events, reports = side.take_missing(), side.take_events(), side.take_reports()
        if not (missing or events or reports):
            return None
        return DaricWorkerMetadata({side.rank: missing}, {side.rank: events}, reports)

    def shutdown(self) -> None:
        """Close the store or the index."""
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.index.close()


def _scheduled(output: SchedulerOutput) -> Iterator[ScheduledRequest]:
    """All requests of a step, in the order in which vLLM scheduled them.

    vLLM lists new requests first but schedules running ones first, and may give a new one blocks that a running
    one fills in this very step.
    """
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starting = set(cached.resumed_req_ids)
    for new in output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
        starting.add(new.req_id)
    for request_id, num_scheduled in output.num_scheduled_tokens.items():
        yield ScheduledRequest(request_id, computed[request_id], num_scheduled, request_id in starting)
