"""What tests and benchmarks count and change in the worker's process, through vLLM's `worker_extension_cls`."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from daric_rag.engine.scheduling.connector import DaricMetadata
from daric_rag.engine.scheduling.scheduler_side import SchedulerSide

if TYPE_CHECKING:
    from daric_rag import DaricEngine

EXTENSION: dict[str, Any] = {"worker_extension_cls": "tests.worker_probe.WorkerProbe"}
"""The engine argument that puts the probe into an engine."""


@dataclass
class Counts:
    """Of the steps since the probe was last started; `reuse_passes` has one number per step with reuse."""

    steps: int = 0
    passes: int = 0
    reuse_passes: list[int] = field(default_factory=list)
    preemptions: int = 0
    longest_step_s: float = 0.0


class WorkerProbe:
    """Methods that vLLM adds to the worker; nothing changes until one of them is called."""

    execute_model: Any
    model_runner: Any

    def probe_start(self) -> None:
        """Count from now on."""
        if not hasattr(self, "_probe_counts"):
            self._probe_wrap()
        self._probe_counts = Counts()

    def probe_counts(self) -> dict[str, Any]:
        """The counts as a dict, with `tracked_requests` where the scheduler is in this process."""
        values = dict(vars(self._probe_counts))
        sides = [one for one in gc.get_objects() if type(one) is SchedulerSide]
        throttled = getattr(os.preadv, "num_bytes", 0)
        return {
            **values,
            "tracked_requests": sum(side.num_tracked for side in sides),
            "throttled_bytes": throttled,
        }

    def probe_throttle_reads(self, bytes_per_s: float) -> None:
        """Let reads of files through `os.preadv`, all threads together, be as slow as a disk of that speed."""
        if not isinstance(os.preadv, _SlowDisk):
            os.preadv = _SlowDisk(os.preadv)  # type: ignore[assignment]
        os.preadv.bytes_per_s = bytes_per_s  # type: ignore[attr-defined]

    def _probe_wrap(self) -> None:
        step, run = self.execute_model, self.model_runner.execute_model

        def counted_step(scheduler_output: Any) -> Any:
            counts, before = self._probe_counts, self._probe_counts.passes
            started = time.perf_counter()
            result = step(scheduler_output)
            counts.longest_step_s = max(counts.longest_step_s, time.perf_counter() - started)
            counts.steps += 1
            counts.preemptions += len(scheduler_output.preempted_req_ids or ())
            meta = scheduler_output.kv_connector_metadata
            if isinstance(meta, DaricMetadata) and meta.plans:
                counts.reuse_passes.append(counts.passes - before)
            return result

        def counted_pass(*args: Any, **kwargs: Any) -> Any:
            self._probe_counts.passes += 1
            return run(*args, **kwargs)

        self.execute_model, self.model_runner.execute_model = counted_step, counted_pass


class _SlowDisk:
    """`os.preadv` of one device: a read is done once all reads before it and its own have gone through."""

    def __init__(self, read: Callable[..., int]) -> None:
        self.bytes_per_s = 1e12
        self.num_bytes = 0
        self._read = read
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __call__(self, *args: Any) -> int:
        count = self._read(*args)
        with self._lock:
            self.num_bytes += count
            self._free_at = max(self._free_at, time.monotonic()) + count / self.bytes_per_s
            done_at = self._free_at
        time.sleep(max(0.0, done_at - time.monotonic()))
        return count


def ask_worker(engine: DaricEngine, method: str, *args: Any) -> Any:
    """Call a method of the probe in the (first) worker of an engine."""
    return engine._loop.run(engine._llm.collective_rpc(method, args=args))[0]
