"""What happens around every layer's attention: KV is loaded, saved and re-encoded.

Layer-wise hooks run in the middle of vLLM's forward pass, so everything they need is prepared before it: a
`Transfer` for what is loaded before a layer's attention, and one each for what is saved and rotated after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from daric_rag.engine.storage.base import WriteHandle
from daric_rag.engine.storage.store import KVStore
from daric_rag.engine.worker.after_attention import (
    AfterLayer,
    correcting,
    watching_alone,
    watching_in_context,
)
from daric_rag.engine.worker.calibration import Calibration
from daric_rag.engine.worker.correction import Correction
from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.passes import Generation, Pass
from daric_rag.engine.worker.rope import RopeParameters
from daric_rag.engine.worker.step_work import LoadedChunk, StepWork
from daric_rag.engine.worker.transfer import Kind, LayerStream, Transfer
from daric_rag.engine.worker.transfer_builder import TransferBuilder


@dataclass(frozen=True)
class _Transfers:
    """What the hooks of one pass do at every layer."""

    scatter: Transfer | None = None
    gather: Transfer | None = None
    rotate: Transfer | None = None
    # Called with the layer after its attention: before it is saved, and those that only look after the pass's own.
    correct: tuple[AfterLayer, ...] = ()
    watch: tuple[AfterLayer, ...] = ()
    # Chunks of `scatter` that are still being read from disk: awaited layer by layer.
    arriving: tuple[LoadedChunk, ...] = ()
    deadline: float | None = None


_NOTHING = _Transfers()


class LayerHooks:
    """Moves KV between the blocks of vLLM's cache and records, layer by layer; used by the worker's thread only.

    `kv_caches`: vLLM's KV tensors by layer name. `dtype`: of the records.
    """

    def __init__(self, kv_caches: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        from vllm.model_executor.models.utils import extract_layer_index

        names = sorted(kv_caches, key=extract_layer_index)
        self.caches = KVCaches.of([kv_caches[name] for name in names])
        self._layer_numbers = {name: number for number, name in enumerate(names)}
        self.dtype = dtype
        self.stream = LayerStream.on(self.caches.device)
        self._rope: RopeParameters | None = None
        self._pass = _NOTHING
        self._damaged: list[LoadedChunk] = []
        # Records that passes of this step save: complete once the stream is through.
        self._saved: list[WriteHandle] = []
        # By the profile's digest.
        self.corrections: dict[str, Correction] = {}
        self.calibration: Calibration | None = None

    def set_rope(self, rope: RopeParameters) -> None:
        """Give the model's rotary parameters, once it is loaded."""
        self._rope = rope

    @property
    def rope(self) -> RopeParameters:
        """The model's rotary parameters."""
        assert self._rope is not None
        return self._rope

    @property
    def num_layers(self) -> int:
        """Layers with a KV cache."""
        return len(self.caches.layers)

    def builder(self) -> TransferBuilder:
        """Collects what a transfer moves in these blocks."""
        return TransferBuilder(self.caches, self.dtype, self.rope)

    def take_damaged(self) -> list[LoadedChunk]:
        """Chunks whose bytes a pass waited for in vain, since the last call."""
        damaged, self._damaged = self._damaged, []
        return damaged

    def publish_saves(self, store: KVStore) -> None:
        """Wait for all transfers, then make saved records visible; after it nothing reads pinned ones."""
        self.stream.synchronize()
        for handle in self._saved:
            store.commit(handle)
        self._saved.clear()

    # ---- passes ----

    @contextlib.contextmanager
    def generation(self, work: StepWork, one: Pass) -> Iterator[None]:
        """Around a pass of the cache-generation phase.

        Partly cached chunks get their beginning first; a chunk that the pass completes is corrected, saved, then
        re-encoded to where it stands.
        """
        load, save, rotate = self.builder(), self.builder(), self.builder()
        beginning = {id(generation.chunk) for generation in one.starts}
        for loaded in work.prefixes:
            if id(loaded.chunk) in beginning:
                load.add_load(loaded, recomputed=(), reencode=False)
        handles: list[WriteHandle] = []
        for generation in one.completes:
            if self._can_be_stored(generation):
                handles += save.add_save(generation, work.store)
            if not generation.plan.warm:
                rotate.add_rotation(generation)
        transfers = _Transfers(
            load.build(Kind.SCATTER),
            save.build(Kind.GATHER),
            rotate.build(Kind.ROTATE),
            tuple(correcting(self.corrections, one.completes, self.builder)),
            tuple(watching_alone(self.calibration, one.completes, self.builder)),
        )
        with self._during(transfers):
            yield
        self._saved += handles

    def _can_be_stored(self, generation: Generation) -> bool:
        """Not what is only measured, and not under the name of a profile that this rank does not have."""
        profile = generation.chunk.profile
        return generation.plan.calibration is None and (not profile or profile in self.corrections)

    @contextlib.contextmanager
    def recomputation(self, work: StepWork, one: Pass, *, is_first: bool) -> Iterator[None]:
        """Around a pass of the partial-recomputation phase.

        In the first one loaded chunks are written, without the tokens recomputed in this step.
        """
        watch = tuple(watching_in_context(self.calibration, work.plans, one, self.builder))
        if not is_first:
            with self._during(_Transfers(watch=watch)):
                yield
            return
        recomputed = {item.plan.request_id: item.ranges for item in work.recomputations}
        load = self.builder()
        wanted = [loaded for loaded in work.loads if not loaded.plan.warm]
        for loaded in wanted:
            load.add_load(loaded, recomputed.get(loaded.plan.request_id, ()), reencode=True)
        arriving = tuple(loaded for loaded in wanted if not loaded.has_arrived(self.num_layers - 1))
        transfers = _Transfers(
            load.build(Kind.SCATTER), watch=watch, arriving=arriving, deadline=work.deadline
        )
        with self._during(transfers):
            yield

    @contextlib.contextmanager
    def _during(self, transfers: _Transfers) -> Iterator[None]:
        self._pass = transfers
        try:
            yield
        finally:
            self._pass = _NOTHING

    def load_without_forward(self) -> None:
        """Do the prepared loads at once: the step has no forward pass."""
        self.start_pass()
        for layer_name in self._layer_numbers:
            self.before_layer(layer_name)

    # ---- vLLM's hooks ----

    def start_pass(self) -> None:
        """The forward pass is about to begin."""
        if self._pass.scatter is not None:
            self.stream.start(self._pass.scatter, self._arrive, self._has_arrived)

    def before_layer(self, layer_name: str) -> None:
        """The layer's K and V of this pass are written, its attention has not run."""
        if self._pass.scatter is not None:
            self.stream.need(self._layer_numbers[layer_name])

    def after_layer(self, layer_name: str) -> None:
        """The layer's attention has run; its chunk-relative KV is corrected and saved, then its keys re-encoded."""
        layer = self._layer_numbers[layer_name]
        for look in self._pass.watch:
            look(layer)
        for correct in self._pass.correct:
            correct(layer)
        if self._pass.gather is not None:
            self.stream.save(self._pass.gather, layer)
        if self._pass.rotate is not None:
            self._pass.rotate.run(layer)

    def _has_arrived(self, layer: int) -> bool:
        return all(loaded.has_arrived(layer) for loaded in self._pass.arriving)

    def _arrive(self, layer: int) -> None:
        for loaded in self._pass.arriving:
            if loaded not in self._damaged and not all(
                handle.wait(layer, self._pass.deadline) for handle in loaded.handles
            ):
                # The pass goes on with whatever lies there, and is repeated.
                self._damaged.append(loaded)
