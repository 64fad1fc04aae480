"""Layer-wise transfers beside the forward pass: a side stream with events on CUDA, in line on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LayerStream:
    """Runs one transfer per layer on a side stream, and lets the computing stream wait for single layers.

    On the CPU, where transfers and the forward pass share the same cores, work is done when it is submitted.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._events: dict[int, Any] = {}

    def begin(self) -> None:
        """Order what follows after all that the computing stream was given so far, such as zeroing blocks."""
        self._events.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def submit(self, layer: int, transfer: Callable[[], None]) -> None:
        """Enqueue `transfer` of `layer`, which calls ops of this device."""
        if self._stream is None:
            transfer()
            return
        with torch.cuda.stream(self._stream):
            transfer()
            self._events[layer] = self._stream.record_event()

    def wait(self, layer: int) -> None:
        """Make the computing stream wait for `layer`; a layer that was not submitted costs nothing."""
        event = self._events.get(layer)
        if event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)

    def synchronize(self) -> None:
        """Block the caller until all submitted transfers are done; then their records may be freed."""
        if self._stream is not None:
            self._stream.synchronize()
