"""The worker's half of the connector: loads, re-encodes and saves KV layer by layer.

Layer-wise hooks run in the middle of vLLM's forward pass, so everything they need is prepared before it: a
`TransferPlan` for what is loaded before a layer's attention, and one for what is saved and rotated after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from daric_rag.config import DaricConfig
from daric_rag.engine.fingerprint import storage_dtype
from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.plan import ChunkWork, StepPlan, clip
from daric_rag.engine.storage.base import ReadHandle, RecordSpec, StoreEvent, WriteHandle
from daric_rag.engine.storage.opening import open_store
from daric_rag.engine.token_ranges import TokenRange, subtract, total, union
from daric_rag.engine.worker.kv_layout import KVLayout, gpu_layout, learn_cpu_layout
from daric_rag.engine.worker.passes import Generation, Recomputation
from daric_rag.engine.worker.rope import RopeParameters, delta_table
from daric_rag.engine.worker.transfer.layer_stream import LayerStream
from daric_rag.engine.worker.transfer.ops import (
    NO_RECORD,
    NO_ROTATION,
    RopeTable,
    TransferPlan,
    TransferRange,
    gather_,
    rotate_,
    scatter_,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from daric_rag.engine.storage.store import KVStore


@dataclass(frozen=True, eq=False)
class LoadedChunk:
    """A chunk whose KV comes from the store; `handles` are its pinned segments from `first_segment` on."""

    plan: StepPlan
    chunk: ChunkWork
    first_segment: int
    handles: tuple[ReadHandle, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every segment that must be written is pinned."""
        return self.first_segment + len(self.handles) == len(self.chunk.segments)

    def has_arrived(self, layer: int) -> bool:
        """Whether the bytes of `layer` are all in memory."""
        return all(handle.is_ready(layer) for handle in self.handles)


@dataclass
class StepWork:
    """One step, sorted by where each chunk's KV comes from. Holds pins until `WorkerSide.end_step`.

    `live`: by request, the ranges whose only source is the recomputation phase.
    """

    plans: Sequence[StepPlan] = ()
    loads: list[LoadedChunk] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    prefixes: list[LoadedChunk] = field(default_factory=list)
    live: dict[str, list[TokenRange]] = field(default_factory=dict)
    recomputations: list[Recomputation] = field(default_factory=list)
    reports: dict[str, RequestReport] = field(default_factory=dict)


@dataclass(frozen=True)
class _Transfers:
    """What the hooks of one pass do at every layer."""

    scatter: TransferPlan | None = None
    gather: TransferPlan | None = None
    rotate: TransferPlan | None = None
    rope: RopeTable | None = None
    # Chunks of `scatter` that are still being read from disk: awaited layer by layer.
    arriving: tuple[LoadedChunk, ...] = ()


_NOTHING = _Transfers()


class WorkerSide:
    """Owns one rank's store and moves KV between it and vLLM's blocks; used by the worker's own thread only."""

    def __init__(self, vllm_config: VllmConfig, config: DaricConfig, root: bytes) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._root = root
        self._dtype = storage_dtype(vllm_config, config)
        self._rope: RopeParameters | None = None
        self._caches: list[torch.Tensor] = []
        self._layer_numbers: dict[str, int] = {}
        self._layout: KVLayout | None = None
        self._store: KVStore | None = None
        self._stream: LayerStream | None = None
        self.in_step = False
        self._pass = _NOTHING
        self._transfer_s = 0.0
        self._reports: dict[str, RequestReport] = {}
        self._saving: list[WriteHandle] = []
        self._damaged: list[LoadedChunk] = []
        self._missing: list[SegmentKey] = []
        self._num_submitted = 0

    @property
    def store(self) -> KVStore:
        """The store; there is none before `register_kv_caches`."""
        assert self._store is not None
        return self._store

    # ---- start and end ----

    def set_rope(self, rope: RopeParameters) -> None:
        """Give the model's rotary parameters, once it is loaded."""
        self._rope = rope

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's KV tensors, one a layer, learn their block layout and open the store."""
        from vllm.model_executor.models.utils import extract_layer_index

        names = sorted(kv_caches, key=extract_layer_index)
        self._caches = [kv_caches[name] for name in names]
        self._layer_numbers = {name: number for number, name in enumerate(names)}
        first = self._caches[0]
        _, num_kv_heads, block_size, width = first.shape
        if first.device.type == "cpu":
            self._layout = learn_cpu_layout(num_kv_heads, width // 2, block_size, first.dtype)
        else:
            self._layout = gpu_layout(first)
            self._stream = LayerStream(first.device)
        spec = RecordSpec(len(names), num_kv_heads, width // 2, self._dtype)
        parallel = self._vllm_config.parallel_config
        self._store = open_store(
            self._config,
            spec,
            self._root,
            model_id=self._vllm_config.model_config.model,
            rank=parallel.rank,
            pin_memory=first.device.type == "cuda",
        )

    def close(self) -> None:
        """Close the store; its disk tier stays usable."""
        if self._store is not None:
            self._store.close()

    def take_events(self) -> list[StoreEvent]:
        """What the store did since the last call."""
        return self._store.drain_events() if self._store is not None else []

    def take_missing(self) -> list[SegmentKey]:
        """Segments that the index promised and the store did not have, since the last call."""
        missing, self._missing = self._missing, []
        return missing

    def take_reports(self) -> dict[str, RequestReport]:
        """What happened to the tokens of requests since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    # ---- one step ----

    def begin_step(self, plans: Sequence[StepPlan]) -> StepWork:
        """Pin what can be loaded and decide, chunk by chunk, between load, generation and full context."""
        self.in_step = True
        work = StepWork(plans)
        # All reads are under way before the first is waited for.
        pinned = [[self._acquire(chunk) for chunk in plan.chunks] for plan in plans]
        for plan, chunk_handles in zip(plans, pinned, strict=True):
            work.reports[plan.request_id] = RequestReport(plan.attempt)
            work.live[plan.request_id] = list(plan.live)
            for chunk, (first, handles) in zip(plan.chunks, chunk_handles, strict=True):
                self._sort_chunk(work, LoadedChunk(plan, chunk, first, tuple(handles)))
        _plan_recomputations(work)
        return work

    def _acquire(self, chunk: ChunkWork) -> tuple[int, list[ReadHandle]]:
        """Pin the segments that the plan counts on: the first one to be written, and their handles in order."""
        first = next(
            (n for n, segment in enumerate(chunk.segments) if chunk.start + segment.end > chunk.write_from), 0
        )
        handles: list[ReadHandle] = []
        for segment in chunk.segments[first : chunk.num_cached]:
            handle = self.store.acquire(segment.key)
            if handle is None:
                self._missing.append(segment.key)
                break
            if handle.num_tokens != segment.num_tokens:
                self.store.release(handle)
                break
            handles.append(handle)
        return first, handles

    def _verified(self, loaded: LoadedChunk) -> LoadedChunk:
        """Wait for the chunk's bytes; from the first damaged segment on its pins are given back."""
        num_layers = len(self._caches)
        for number, handle in enumerate(loaded.handles):
            if not all(map(handle.wait, range(num_layers))):
                self._release(loaded.handles[number:])
                return replace(loaded, handles=loaded.handles[:number])
        return loaded

    def _sort_chunk(self, work: StepWork, loaded: LoadedChunk) -> None:
        plan, chunk = loaded.plan, loaded.chunk
        if plan.warm or not loaded.is_whole:
            # A warm request writes nothing, so nothing else would notice a damaged record; and a generation pass
            # needs its beginning before it starts.
            loaded = self._verified(loaded)
        handles = loaded.handles
        report = work.reports[plan.request_id]
        report.failed_segments += max(0, chunk.num_cached - loaded.first_segment - len(handles))
        if loaded.is_whole:
            work.loads.append(loaded)
            report.loaded_tokens += chunk.end - chunk.write_from
        elif chunk.write_from > chunk.start:
            # Its beginning lies in blocks of the engine's prefix cache, re-encoded already and perhaps shared:
            # it cannot be generated on its own there.
            self._release(handles)
            work.live[plan.request_id].append((chunk.write_from, chunk.end))
        else:
            num_loaded = chunk.segments[len(handles) - 1].end if handles else 0
            if handles:
                work.prefixes.append(loaded)
            work.generations.append(Generation(plan, chunk, num_loaded))
            report.loaded_tokens += num_loaded
            report.generated_tokens += chunk.end - chunk.start - num_loaded

    def give_up_damaged(self, work: StepWork) -> bool:
        """Generate the chunks that a pass found damaged; True if there are any, and the pass must be repeated."""
        damaged, self._damaged = self._damaged, []
        if not damaged:
            return False
        for loaded in damaged:
            work.loads.remove(loaded)
            work.reports[loaded.plan.request_id].loaded_tokens -= loaded.chunk.end - loaded.chunk.write_from
            self._release(loaded.handles)
            self._sort_chunk(work, replace(loaded, handles=()))
        _plan_recomputations(work)
        return True

    def _release(self, handles: Iterable[ReadHandle]) -> None:
        for handle in handles:
            self.store.release(handle)

    def end_step(self, work: StepWork) -> None:
        """Unpin everything and publish the reports."""
        self.in_step = False
        self._pass = _NOTHING
        for loaded in (*work.loads, *work.prefixes):
            self._release(loaded.handles)
        self._reports.update(work.reports)

    # ---- one pass ----

    def prepare_generation(
        self, work: StepWork, starts: Sequence[Generation], completes: Sequence[Generation]
    ) -> None:
        """Arrange a pass of the cache-generation phase: partly cached chunks get their beginning first."""
        scatter = _Builder()
        beginning = {id(generation.chunk) for generation in starts}
        for loaded in work.prefixes:
            if id(loaded.chunk) in beginning:
                _add_load(scatter, loaded, holes=(), rotate=False)
        gather, rotate = _Builder(), _Builder()
        for generation in completes:
            self._add_save(gather, generation)
            chunk = generation.chunk
            if chunk.start > 0 and not generation.plan.warm:
                offset = rotate.table(generation.plan)
                row = rotate.rope_row(chunk.start)
                count = chunk.end - chunk.start
                rotate.ranges.append(TransferRange(NO_RECORD, 0, 0, count, chunk.start, offset, row))
        self._pass = _Transfers(
            self._build(scatter), self._build(gather), self._build(rotate), self._rope_table(rotate)
        )

    def prepare_recomputation(self, work: StepWork) -> None:
        """Arrange the pass in which the loaded chunks are written, without the tokens recomputed in it."""
        holes = {item.plan.request_id: item.ranges for item in work.recomputations}
        scatter = _Builder()
        wanted = [loaded for loaded in work.loads if not loaded.plan.warm]
        for loaded in wanted:
            _add_load(scatter, loaded, holes.get(loaded.plan.request_id, ()), rotate=True)
        arriving = tuple(loaded for loaded in wanted if not loaded.has_arrived(len(self._caches) - 1))
        self._pass = _Transfers(
            scatter=self._build(scatter), rope=self._rope_table(scatter), arriving=arriving
        )

    def load_without_forward(self) -> None:
        """Do the prepared loads at once: the step has no forward pass."""
        for layer in range(len(self._caches)):
            self._load_layer(layer)

    def start_pass(self) -> None:
        """Hook: the forward pass is about to begin. On a GPU its loads run beside it, on a stream of their own."""
        self._num_submitted = 0
        if self._stream is not None and self._pass.scatter is not None:
            self._stream.begin()
            self._submit_arrived()

    def before_layer(self, layer_name: str) -> None:
        """Hook: the layer's K and V of this pass are written, its attention has not run."""
        if self._pass.scatter is not None:
            layer = self._layer_numbers[layer_name]
            if self._stream is None:
                self._load_layer(layer)
                return
            while self._num_submitted <= layer:
                self._submit_layer()
            self._submit_arrived()
            self._stream.wait(layer)

    def _submit_arrived(self) -> None:
        """Start the transfers of all layers that need not be waited for."""
        while self._num_submitted < len(self._caches) and all(
            loaded.has_arrived(self._num_submitted) for loaded in self._pass.arriving
        ):
            self._submit_layer()

    def _submit_layer(self) -> None:
        assert self._stream is not None
        self._stream.submit(self._num_submitted, partial(self._load_layer, self._num_submitted))
        self._num_submitted += 1

    def _load_layer(self, layer: int) -> None:
        if self._pass.scatter is not None:
            started = time.perf_counter()
            for loaded in self._pass.arriving:
                if loaded not in self._damaged and not all(handle.wait(layer) for handle in loaded.handles):
                    # The pass goes on with whatever lies there, and is repeated.
                    self._damaged.append(loaded)
            scatter_(self._caches[layer], self._get_layout(), self._pass.scatter, layer, self._pass.rope)
            self._transfer_s += time.perf_counter() - started

    def after_layer(self, layer_name: str) -> None:
        """Hook: the layer's attention has run; its chunk-relative keys are saved, then re-encoded."""
        layer = self._layer_numbers[layer_name]
        if self._pass.gather is not None:
            gather_(self._caches[layer], self._get_layout(), self._pass.gather, layer)
        if self._pass.rotate is not None:
            rotate_(self._caches[layer], self._get_layout(), self._pass.rotate, layer, self._pass.rope)

    def finish_pass(self) -> float:
        """Make saved records visible; return the seconds spent loading."""
        if self._stream is not None:
            # Records are read and written by the device: neither is over when Python gets here.
            torch.cuda.current_stream().synchronize()
            self._stream.synchronize()
        for handle in self._saving:
            self.store.commit(handle)
        self._saving.clear()
        self._pass = _NOTHING
        seconds, self._transfer_s = self._transfer_s, 0.0
        return seconds

    def _add_save(self, gather: _Builder, generation: Generation) -> None:
        chunk = generation.chunk
        offset = gather.table(generation.plan)
        for segment in chunk.segments:
            if segment.end <= generation.num_loaded:
                continue
            handle = self.store.reserve(
                segment.key, segment.parent, segment.num_tokens, namespace=generation.plan.namespace
            )
            if handle is None:  # no room, or the same document twice in this step
                continue
            self._saving.append(handle)
            count = segment.num_tokens
            gather.ranges.append(
                TransferRange(handle.address, count, 0, count, chunk.start + segment.start, offset)
            )

    # ---- start-up check ----

    @property
    def num_blocks(self) -> int:
        """Blocks of vLLM's KV cache."""
        return int(self._caches[0].shape[0])

    def reencoding_error(self, block: int, alone: int, num_tokens: int) -> tuple[float, float]:
        """Re-encode block `alone` by `num_tokens` positions and compare its first layer with that of `block`.

        Returns the largest difference of keys or values, as a share of the largest of them, and what rounding in
        the dtypes of engine and store explains.
        """
        assert self._rope is not None
        dtype = getattr(torch, self._dtype)
        rotate = _Builder()
        rotate.block_tables = [alone]
        row = rotate.rope_row(num_tokens)
        rotate.ranges = [TransferRange(NO_RECORD, 0, 0, num_tokens, 0, 0, row)]
        gather = _Builder()
        gather.block_tables = [block, alone]
        _, num_kv_heads, _, width = self._caches[0].shape
        shape = (2, len(self._caches), 2, num_tokens, num_kv_heads, width // 2)
        records = torch.zeros(shape, dtype=dtype, pin_memory=self._caches[0].device.type == "cuda")
        gather.ranges = [
            TransferRange(record.data_ptr(), num_tokens, 0, num_tokens, 0, offset)
            for offset, record in enumerate(records)
        ]
        rotation, saving = self._build(rotate), self._build(gather)
        assert rotation is not None and saving is not None
        rotate_(self._caches[0], self._get_layout(), rotation, 0, self._rope_table(rotate))
        gather_(self._caches[0], self._get_layout(), saving, 0)
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        inside, moved = records[:, 0].float()
        size = inside.flatten(1).abs().amax(1)
        difference = ((inside - moved).flatten(1).abs().amax(1) / size).max()
        exact = dtype == self._caches[0].dtype == torch.float32
        return float(difference), 1e-3 if exact else 3e-2

    def _get_layout(self) -> KVLayout:
        assert self._layout is not None
        return self._layout

    def _build(self, builder: _Builder) -> TransferPlan | None:
        if not builder.ranges:
            return None
        return TransferPlan.build(
            builder.ranges,
            builder.block_tables,
            layout=self._get_layout(),
            num_blocks=self._caches[0].shape[0],
            num_layers=len(self._caches),
            storage_dtype=getattr(torch, self._dtype),
        )

    def _rope_table(self, builder: _Builder) -> RopeTable | None:
        if not builder.deltas:
            return None
        assert self._rope is not None
        cos, sin = delta_table(self._rope, list(builder.deltas))
        return RopeTable(cos, sin, self._rope.rotary_dim, self._rope.neox)

    def stats(self) -> Any:
        """Counters of the store."""
        return self.store.stats()


def _plan_recomputations(work: StepWork) -> None:
    """What the partial-recomputation phase computes, from the plans and from what has become live."""
    work.recomputations.clear()
    for plan in work.plans:
        live, report = work.live[plan.request_id], work.reports[plan.request_id]
        ranges = union(plan.recompute, live)
        # Text generated before a preemption is computed again too, but is no part of the prompt.
        end = len(plan.token_ids) if plan.num_prompt_tokens is None else plan.num_prompt_tokens
        report.live_tokens = total(clip(union(live), (0, end)))
        report.recomputed_ranges = clip(ranges, (0, end))
        report.recomputed_tokens = total(report.recomputed_ranges)
        if ranges:
            work.recomputations.append(Recomputation(plan, tuple(ranges)))


class _Builder:
    """Collects the ranges of one transfer; every request's block table and every Δposition appears once."""

    def __init__(self) -> None:
        self.ranges: list[TransferRange] = []
        self.block_tables: list[int] = []
        self.deltas: dict[int, int] = {}
        self._offsets: dict[str, int] = {}

    def table(self, plan: StepPlan) -> int:
        """Where the request's block table starts."""
        if plan.request_id not in self._offsets:
            self._offsets[plan.request_id] = len(self.block_tables)
            self.block_tables.extend(plan.block_ids)
        return self._offsets[plan.request_id]

    def rope_row(self, delta: int) -> int:
        """Row of the rotation by `delta` positions; none for 0."""
        return self.deltas.setdefault(delta, len(self.deltas)) if delta else NO_ROTATION


def _add_load(builder: _Builder, loaded: LoadedChunk, holes: Sequence[TokenRange], *, rotate: bool) -> None:
    """Ranges that write a chunk's segments into its blocks, without the positions in `holes`."""
    chunk, offset = loaded.chunk, builder.table(loaded.plan)
    row = builder.rope_row(chunk.start) if rotate else NO_ROTATION
    segments = chunk.segments[loaded.first_segment :]
    for segment, handle in zip(segments, loaded.handles, strict=False):
        begin = chunk.start + segment.start
        wanted = [(max(begin, chunk.write_from), chunk.start + segment.end)]
        for start, end in subtract(wanted, holes):
            builder.ranges.append(
                TransferRange(
                    handle.address, handle.num_tokens, start - begin, end - start, start, offset, row
                )
            )
