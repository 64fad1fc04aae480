"""The worker's half of the connector: one rank's store, its layer hooks, and what is told to the scheduler."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from daric_rag.config import DaricConfig
from daric_rag.engine.fingerprint import storage_dtype
from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.profile import Profile, write_maps
from daric_rag.engine.scheduling.plan import StepPlan
from daric_rag.engine.storage.base import RecordSpec, StoreEvent
from daric_rag.engine.storage.opening import open_store
from daric_rag.engine.worker.agreement import least_of_all_ranks
from daric_rag.engine.worker.calibration import Calibration
from daric_rag.engine.worker.correction import Correction
from daric_rag.engine.worker.layer_hooks import LayerHooks
from daric_rag.engine.worker.load_or_generate import Rate
from daric_rag.engine.worker.step_work import StepWork

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from daric_rag.engine.storage.store import KVStore

# How long a step waits for its reads from disk, all together; what has not come by then is generated.
_MAX_READ_S = 10.0


class WorkerSide:
    """Owns one rank's store and layer hooks; used by the worker's own thread only."""

    def __init__(self, vllm_config: VllmConfig, config: DaricConfig, root: bytes) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._root = root
        self.rank: int = vllm_config.parallel_config.rank
        self._store: KVStore | None = None
        self._hooks: LayerHooks | None = None
        self._reports: dict[str, RequestReport] = {}
        self._missing: list[SegmentKey] = []
        self.in_step = False
        self._generation_rate = Rate()
        self.num_passes = 0
        self.num_reuse_steps = 0

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's KV tensors, one a layer, learn their block layout and open the store."""
        dtype = storage_dtype(self._vllm_config, self._config)
        hooks = self._hooks = LayerHooks(kv_caches, getattr(torch, dtype))
        layout = hooks.caches.layout
        self._store = open_store(
            self._config,
            RecordSpec(hooks.num_layers, layout.num_kv_heads, layout.head_dim, dtype),
            self._root,
            model_id=self._vllm_config.model_config.model,
            rank=self.rank,
            num_ranks=self._vllm_config.parallel_config.tensor_parallel_size,
            longest_prompt=self._vllm_config.model_config.max_model_len,
            pin_memory=hooks.caches.device.type == "cuda",
        )

    @property
    def store(self) -> KVStore:
        """The store; there is none before `register_kv_caches`."""
        assert self._store is not None
        return self._store

    @property
    def hooks(self) -> LayerHooks:
        """What runs around every layer's attention; there is none before `register_kv_caches`."""
        assert self._hooks is not None
        return self._hooks

    @contextlib.contextmanager
    def step(self, plans: Sequence[StepPlan]) -> Iterator[StepWork]:
        """Around the passes of a step: what it loads is pinned inside, its reports are published at the end."""
        self.in_step = True
        self.num_reuse_steps += 1
        work = StepWork(
            plans,
            self.store,
            self.hooks.num_layers,
            agree=least_of_all_ranks,
            tokens_per_s=self._generation_rate.value(),
            deadline=time.monotonic() + _MAX_READ_S,
        )
        try:
            with work:
                try:
                    yield work
                finally:
                    self.hooks.publish_saves(self.store)
                    load_s = self.hooks.stream.take_load_s()
                for report in work.reports.values():
                    report.load_s += load_s
        finally:
            self.in_step = False
            self._missing += work.missing
            if self.hooks.calibration is not None:
                for plan in plans:
                    if plan.is_final and plan.calibration is not None:
                        self.hooks.calibration.forget(plan.request_id)
            self._reports.update(work.reports)

    def load_profile(self, path: str) -> None:
        """Correct chunks with the profile at `path` from now on.

        Raises ValueError if it is damaged or was made for another shape of KV.
        """
        profile = Profile.read(path)
        layout, hooks = self.hooks.caches.layout, self.hooks
        correction = Correction(profile.maps(self.rank), hooks.rope, hooks.caches.device)
        if not correction.is_for(hooks.num_layers, layout.num_kv_heads, layout.head_dim):
            raise ValueError(f"profile {path} has maps of other shapes than this model's KV")
        hooks.corrections[profile.digest] = correction

    def begin_calibration(self) -> None:
        """Watch calibration requests from now on; what an earlier one saw is dropped."""
        self.hooks.calibration = Calibration(self.hooks.caches, self.hooks.rope)

    def end_calibration(self, directory: str | None) -> dict[str, Any]:
        """Fit what was seen and write this rank's maps into `directory`; None: only stop watching."""
        calibration, self.hooks.calibration = self.hooks.calibration, None
        if calibration is None or directory is None:
            return {}
        maps, fits = calibration.solve()
        write_maps(directory, self.rank, maps)
        gains = [dataclasses.asdict(fit.gain) for fit in fits]
        return {"num_tokens": calibration.num_tokens, "layers": gains}

    def measure_generation(self, num_tokens: int, seconds: float) -> None:
        """Note how long a pass took; only where it is over when it returns, so never on a GPU."""
        if self.hooks.stream.in_line:
            self._generation_rate.add(num_tokens, seconds)

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

    def stats(self) -> dict[str, Any]:
        """Counters of the store, steps with reuse, and forward passes in them."""
        counts = {"num_passes": self.num_passes, "num_reuse_steps": self.num_reuse_steps}
        return {**dataclasses.asdict(self.store.stats()), **counts}

    def close(self) -> None:
        """Close the store; its disk tier stays usable."""
        if self._store is not None:
            self._store.close()
