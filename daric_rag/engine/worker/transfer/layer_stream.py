"""Where the transfers of a step run: in line on the CPU, on streams beside the forward pass on CUDA."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from daric_rag.engine.worker.transfer.staging import SLOTS
from daric_rag.engine.worker.transfer.transfer import Transfer


class LayerStream:
    """In line: on the CPU transfers and the forward pass share the same cores, so each is done when it is due.

    In a pass: `start` before its forward if it loads, then `need` before and `save` after a layer's attention.
    After all passes of the step: `synchronize`, and `take_load_s`; `clock` is for the time in between. `in_line`:
    whatever was asked for is over when the call returns, the forward pass included.
    """

    in_line = True

    def __init__(self) -> None:
        self._load_s = 0.0

    @staticmethod
    def on(device: torch.device) -> LayerStream:
        """The stream for caches on `device`."""
        return CudaLayerStream(device) if device.type == "cuda" else LayerStream()

    def start(
        self, scatter: Transfer, arrive: Callable[[int], None], has_arrived: Callable[[int], bool]
    ) -> None:
        """Take the loads of a pass; `arrive` blocks until a layer of the records is in host memory."""
        self._scatter, self._arrive, self._has_arrived = scatter, arrive, has_arrived

    def need(self, layer: int) -> None:
        """Let what the computing stream does next see the loads of `layer`."""
        started = time.perf_counter()
        self._arrive(layer)
        self._scatter.run(layer)
        self._load_s += time.perf_counter() - started

    def save(self, gather: Transfer, layer: int) -> None:
        """Read `layer` out of the blocks, as the computing stream has left them."""
        gather.run(layer)

    def synchronize(self) -> None:
        """Block until everything has been moved: saved records may be read, loaded ones freed."""

    def take_load_s(self) -> float:
        """Seconds that the loads before `synchronize` took since the last call, waiting for the disk included."""
        seconds, self._load_s = self._load_s, 0.0
        return seconds

    def clock(self) -> float:
        """Seconds that run on while the forward pass does, and stand still while it waits for a load in line."""
        return time.perf_counter() - self._load_s


class CudaLayerStream(LayerStream):
    """Two side streams, one a direction. Nothing in a step waits for the device but `synchronize`."""

    in_line = False

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._loads: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._saves: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Begin and end of the layers of this pass, and of all loads since `synchronize`.
        self._submitted: list[tuple[Any, Any]] = []
        self._timed: list[tuple[Any, Any]] = []
        self._delivered: deque[Any] = deque(maxlen=SLOTS)
        # Their buffers are in use until `synchronize`, whatever the computing stream has passed.
        self._in_use: set[Transfer] = set()

    def start(
        self, scatter: Transfer, arrive: Callable[[int], None], has_arrived: Callable[[int], bool]
    ) -> None:
        """Begin, behind all that the computing stream was given (zeroing blocks), with what has arrived."""
        super().start(scatter, arrive, has_arrived)
        self._in_use.add(scatter)
        self._submitted = []
        self._loads.wait_stream(self._computing())
        self._submit_arrived()

    def need(self, layer: int) -> None:
        """Submit whatever is missing up to `layer`, and let the computing stream wait for it."""
        while len(self._submitted) <= layer:
            self._submit_next()
        self._submit_arrived()
        self._computing().wait_event(self._submitted[layer][1])

    def save(self, gather: Transfer, layer: int) -> None:
        """Gather on the computing stream into a buffer, whose copy to the host runs on beside it."""
        computing = self._computing()
        if len(self._delivered) == SLOTS:
            computing.wait_event(self._delivered[0])
        self._in_use.add(gather)
        gather.move(layer)
        self._saves.wait_stream(computing)
        with torch.cuda.stream(self._saves):
            gather.deliver(layer)
            self._delivered.append(self._saves.record_event())

    def synchronize(self) -> None:
        """Block until the side streams are through; the computing stream may go on."""
        self._loads.synchronize()
        self._saves.synchronize()
        self._load_s += sum(begin.elapsed_time(end) for begin, end in self._timed) / 1e3
        self._timed.clear()
        self._in_use.clear()

    def clock(self) -> float:
        """Loads run beside: they hold nothing up but by what the host waits for."""
        return time.perf_counter()

    def _computing(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def _submit_arrived(self) -> None:
        while len(self._submitted) < self._scatter.num_layers and self._has_arrived(len(self._submitted)):
            self._submit_next()

    def _submit_next(self) -> None:
        layer, started = len(self._submitted), time.perf_counter()
        self._arrive(layer)
        self._load_s += time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._loads):
            self._loads.record_event(begin)
            self._scatter.run(layer)
            self._loads.record_event(end)
        self._submitted.append((begin, end))
        self._timed.append((begin, end))
