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
from daric_rag.engine.kv_layout import KVLayout, gpu_layout, learn_cpu_layout
from daric_rag.engine.opening import open_store
from daric_rag.engine.passes import Generation, Recomputation
from daric_rag.engine.plan import ChunkWork, StepPlan
from daric_rag.engine.report import RequestReport
from daric_rag.engine.rope import RopeParameters, delta_table
from daric_rag.engine.storage.base import ReadHandle, RecordSpec, StoreEvent, WriteHandle
from daric_rag.engine.token_ranges import TokenRange, subtract, total, union
from daric_rag.engine.transfer import (
    NO_RECORD,
    NO_ROTATION,
    RopeTable,
    TransferPlan,
    TransferRange,
    gather_,
    rotate_,
    scatter_,
)
from daric_rag.engine.transfer_stream import LayerStream

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from daric_rag.engine.storage.store import KVStore


@dataclass(frozen=True)
class LoadedChunk:
    """A chunk whose KV comes from the store; `handles` are its pinned segments from `first_segment` on."""

    plan: StepPlan
    chunk: ChunkWork
    first_segment: int
    handles: tuple[ReadHandle, ...]


@dataclass
class StepWork:
    """One step, sorted by where each chunk's KV comes from. Holds pins until `WorkerSide.end_step`."""

    loads: list[LoadedChunk] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    prefixes: list[LoadedChunk] = field(default_factory=list)
    recomputations: list[Recomputation] = field(default_factory=list)
    reports: dict[str, RequestReport] = field(default_factory=dict)


@dataclass(frozen=True)
class _Transfers:
    """What the hooks of one pass do at every layer."""

    scatter: TransferPlan | None = None
    gather: TransferPlan | None = None
    rotate: TransferPlan | None = None
    rope: RopeTable | None = None


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

    def take_reports(self) -> dict[str, RequestReport]:
        """What happened to the tokens of requests since the last call."""
        reports, self._reports = self._reports, {}
        return reports

    # ---- one step ----

    def begin_step(self, plans: Sequence[StepPlan]) -> StepWork:
        """Pin what can be loaded and decide, chunk by chunk, between load, generation and full context."""
        self.in_step = True
        work = StepWork()
        # All reads are under way before the first is waited for.
        pinned = [[self._acquire(chunk) for chunk in plan.chunks] for plan in plans]
        for plan, chunk_handles in zip(plans, pinned, strict=True):
            report = work.reports.setdefault(plan.request_id, RequestReport())
            live = list(plan.live)
            for chunk, (first, handles) in zip(plan.chunks, chunk_handles, strict=True):
                self._sort_chunk(work, LoadedChunk(plan, chunk, first, tuple(handles)), live, report)
            ranges = union(plan.recompute, live)
            report.live_tokens += total(union(live))
            report.recomputed_tokens += total(ranges)
            report.recomputed_ranges += ranges
            if ranges:
                work.recomputations.append(Recomputation(plan, tuple(ranges)))
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
                break
            handles.append(handle)
        return first, handles

    def _verified(self, loaded: LoadedChunk) -> LoadedChunk:
        """Wait for the chunk's bytes; from the first damaged segment on its pins are given back."""
        num_layers = len(self._caches)
        segments = loaded.chunk.segments[loaded.first_segment :]
        for number, (segment, handle) in enumerate(zip(segments, loaded.handles, strict=False)):
            if handle.num_tokens != segment.num_tokens or not all(map(handle.wait, range(num_layers))):
                self._release(loaded.handles[number:])
                return replace(loaded, handles=loaded.handles[:number])
        return loaded

    def _sort_chunk(
        self, work: StepWork, pinned: LoadedChunk, live: list[TokenRange], report: RequestReport
    ) -> None:
        loaded = self._verified(pinned)
        plan, chunk, handles = loaded.plan, loaded.chunk, loaded.handles
        report.failed_segments += max(0, chunk.num_cached - loaded.first_segment - len(handles))
        if loaded.first_segment + len(handles) == len(chunk.segments):
            work.loads.append(loaded)
            report.loaded_tokens += chunk.end - chunk.write_from
        elif chunk.write_from > chunk.start:
            # Its beginning lies in blocks of the engine's prefix cache, re-encoded already and perhaps shared:
            # it cannot be generated on its own there.
            self._release(handles)
            live.append((chunk.write_from, chunk.end))
        else:
            num_loaded = chunk.segments[len(handles) - 1].end if handles else 0
            if handles:
                work.prefixes.append(loaded)
            work.generations.append(Generation(plan, chunk, num_loaded))
            report.loaded_tokens += num_loaded
            report.generated_tokens += chunk.end - chunk.start - num_loaded

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
        for loaded in work.loads:
            if not loaded.plan.warm:
                _add_load(scatter, loaded, holes.get(loaded.plan.request_id, ()), rotate=True)
        self._pass = _Transfers(scatter=self._build(scatter), rope=self._rope_table(scatter))

    def load_without_forward(self) -> None:
        """Do the prepared loads at once: the step has no forward pass."""
        for layer in range(len(self._caches)):
            self._load_layer(layer)

    def start_pass(self) -> None:
        """Hook: the forward pass is about to begin. On a GPU its loads run beside it, on a stream of their own."""
        if self._stream is not None and self._pass.scatter is not None:
            self._stream.begin()
            for layer in range(len(self._caches)):
                self._stream.submit(layer, partial(self._load_layer, layer))

    def before_layer(self, layer_name: str) -> None:
        """Hook: the layer's K and V of this pass are written, its attention has not run."""
        if self._pass.scatter is not None:
            layer = self._layer_numbers[layer_name]
            if self._stream is not None:
                self._stream.wait(layer)
            else:
                self._load_layer(layer)

    def _load_layer(self, layer: int) -> None:
        if self._pass.scatter is not None:
            started = time.perf_counter()
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
