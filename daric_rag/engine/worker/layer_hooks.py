"""What happens around every layer's attention: KV is loaded, saved and re-encoded.

Layer-wise hooks run in the middle of vLLM's forward pass, so everything they need is prepared before it: a
`TransferPlan` for what is loaded before a layer's attention, and one each for what is saved and rotated after it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from daric_rag.engine.storage.base import WriteHandle
from daric_rag.engine.worker.kv_layout import KVLayout, gpu_layout, learn_cpu_layout
from daric_rag.engine.worker.passes import Pass
from daric_rag.engine.worker.rope import RopeParameters
from daric_rag.engine.worker.step_work import LoadedChunk, StepWork
from daric_rag.engine.worker.transfer.layer_stream import LayerStream
from daric_rag.engine.worker.transfer.ops import (
    RopeTable,
    TransferPlan,
    gather_,
    rotate_,
    scatter_,
)
from daric_rag.engine.worker.transfer_builder import TransferBuilder


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


class LayerHooks:
    """Moves KV between the blocks of vLLM's cache and records, layer by layer; used by the worker's thread only.

    `kv_caches`: vLLM's KV tensors by layer name. `dtype`: of the records.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        from vllm.model_executor.models.utils import extract_layer_index

        names = sorted(kv_caches, key=extract_layer_index)
        self.caches = [kv_caches[name] for name in names]
        self._layer_numbers = {name: number for number, name in enumerate(names)}
        self.dtype = dtype
        first = self.caches[0]
        _, self.num_kv_heads, block_size, width = first.shape
        self.head_dim = width // 2
        self.stream: LayerStream | None = None
        if first.device.type == "cpu":
            self.layout: KVLayout = learn_cpu_layout(
                self.num_kv_heads, self.head_dim, block_size, first.dtype
            )
        else:
            self.layout = gpu_layout(first)
            self.stream = LayerStream(first.device)
        self._rope: RopeParameters | None = None
        self._pass = _NOTHING
        self._num_submitted = 0
        self._damaged: list[LoadedChunk] = []
        self._load_s = 0.0

    def set_rope(self, rope: RopeParameters) -> None:
        """Give the model's rotary parameters, once it is loaded."""
        self._rope = rope

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""
        return len(self.caches)

    @property
    def num_blocks(self) -> int:
        """Blocks of vLLM's KV cache."""
        return int(self.caches[0].shape[0])

    def builder(self) -> TransferBuilder:
        """Collects what a transfer moves in these blocks."""
        assert self._rope is not None
        return TransferBuilder(self.layout, self.num_blocks, self.num_layers, self.dtype, self._rope)

    def take_damaged(self) -> list[LoadedChunk]:
        """Chunks whose bytes a pass waited for in vain, since the last call."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def take_load_s(self) -> float:
        """Seconds spent loading since the last call."""
        seconds, self._load_s = self._load_s, 0.0
        return seconds

    # ---- passes ----

    @contextlib.contextmanager
    def generation(self, work: StepWork, one: Pass) -> Iterator[None]:
        """Around a pass of the cache-generation phase.

        Partly cached chunks get their beginning first; a chunk that the pass completes is saved, then re-encoded
        to where it stands.
        """
        load, save, rotate = self.builder(), self.builder(), self.builder()
        beginning = {id(generation.chunk) for generation in one.starts}
        for loaded in work.prefixes:
            if id(loaded.chunk) in beginning:
                load.add_load(loaded, recomputed=(), reencode=False)
        handles: list[WriteHandle] = []
        for generation in one.completes:
            handles += save.add_save(generation, work.store)
            if not generation.plan.warm:
                rotate.add_rotation(generation)
        transfers = _Transfers(load.build(), save.build(), rotate.build(), rotate.rope_table())
        with self._during(transfers):
            yield
        for handle in handles:
            work.store.commit(handle)

    @contextlib.contextmanager
    def recomputation(self, work: StepWork) -> Iterator[None]:
        """Around the pass in which the loaded chunks are written, without the tokens recomputed in this step."""
        recomputed = {item.plan.request_id: item.ranges for item in work.recomputations}
        load = self.builder()
        wanted = [loaded for loaded in work.loads if not loaded.plan.warm]
        for loaded in wanted:
            load.add_load(loaded, recomputed.get(loaded.plan.request_id, ()), reencode=True)
        arriving = tuple(loaded for loaded in wanted if not loaded.has_arrived(self.num_layers - 1))
        transfers = _Transfers(scatter=load.build(), rope=load.rope_table(), arriving=arriving)
        with self._during(transfers):
            yield

    @contextlib.contextmanager
    def _during(self, transfers: _Transfers) -> Iterator[None]:
        self._pass = transfers
        try:
            yield
            if self.stream is not None:
                # Records are read and written by the device: neither is over when Python gets here.
                torch.cuda.current_stream().synchronize()
                self.stream.synchronize()
        finally:
            self._pass = _NOTHING

    def load_without_forward(self) -> None:
        """Do the prepared loads at once: the step has no forward pass."""
        for layer in range(self.num_layers):
            self._load_layer(layer)

    # ---- vLLM's hooks ----

    def start_pass(self) -> None:
        """The forward pass is about to begin. On a GPU its loads run beside it, on a stream of their own."""
        self._num_submitted = 0
        if self.stream is not None and self._pass.scatter is not None:
            self.stream.begin()
            self._submit_arrived()

    def before_layer(self, layer_name: str) -> None:
        """The layer's K and V of this pass are written, its attention has not run."""
        if self._pass.scatter is None:
            return
        layer = self._layer_numbers[layer_name]
        if self.stream is None:
            self._load_layer(layer)
            return
        while self._num_submitted <= layer:
            self._submit_layer()
        self._submit_arrived()
        self.stream.wait(layer)

    def after_layer(self, layer_name: str) -> None:
        """The layer's attention has run; its chunk-relative keys are saved, then re-encoded."""
        layer = self._layer_numbers[layer_name]
        if self._pass.gather is not None:
            gather_(self.caches[layer], self.layout, self._pass.gather, layer)
        if self._pass.rotate is not None:
            rotate_(self.caches[layer], self.layout, self._pass.rotate, layer, self._pass.rope)

    def _submit_arrived(self) -> None:
        """Start the transfers of all layers that need not be waited for."""
        while self._num_submitted < self.num_layers and all(
            loaded.has_arrived(self._num_submitted) for loaded in self._pass.arriving
        ):
            self._submit_layer()

    def _submit_layer(self) -> None:
        assert self.stream is not None
        self.stream.submit(self._num_submitted, partial(self._load_layer, self._num_submitted))
        self._num_submitted += 1

    def _load_layer(self, layer: int) -> None:
        if self._pass.scatter is None:
            return
        started = time.perf_counter()
        for loaded in self._pass.arriving:
            if loaded not in self._damaged and not all(handle.wait(layer) for handle in loaded.handles):
                # The pass goes on with whatever lies there, and is repeated.
                self._damaged.append(loaded)
        scatter_(self.caches[layer], self.layout, self._pass.scatter, layer, self._pass.rope)
        self._load_s += time.perf_counter() - started
