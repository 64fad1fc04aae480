"""The order of loads, saves and forward passes: in line on the CPU, and on simulated CUDA streams.

The simulation gives every stream a queue and lets them go on in any order that events allow, as a device does; a
GPU would show one such order (test_transfer_cuda.py).
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.engine.worker.transfer import LayerStream
from daric_rag.engine.worker.transfer.layer_stream import CudaLayerStream
from daric_rag.engine.worker.transfer.staging import SLOTS

LAYERS = 5


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.passed = False

    def elapsed_time(self, end: Event) -> float:
        assert self.passed and end.passed, "events are read after they were waited for"
        return 2.0  # milliseconds


class Stream:
    """A queue of steps; a step that returns False is not due yet."""

    def __init__(self, device: Device) -> None:
        self.device, self.queue = device, deque[Callable[[], Any]]()
        self.speed = 10 ** device.random.uniform(0, 3)
        device.streams.append(self)

    def go_on(self) -> bool:
        """Take a step, if there is one that is due."""
        is_due = bool(self.queue) and self.queue[0]() is not False
        if is_due:
            self.queue.popleft()
        return is_due

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        self.queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(lambda: event.passed)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.device.run(until=lambda: not self.queue)


class Device:
    """All streams, and which of them is current."""

    def __init__(self, seed: int) -> None:
        self.random, self.streams = random.Random(seed), list[Stream]()
        self.computing = self.current = Stream(self)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, until: Callable[[], bool]) -> None:
        """Let streams go on until something holds, in any order, some of them much faster than others."""
        while not until():
            in_turn = sorted(self.streams, key=lambda stream: self.random.random() * stream.speed)
            assert any(stream.go_on() for stream in reversed(in_turn)), "no stream can go on"

    def patched(self, patch: pytest.MonkeyPatch) -> CudaLayerStream:
        patch.setattr(torch.cuda, "Stream", lambda _: Stream(self))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda _: self.current)
        return CudaLayerStream(torch.device("cuda"))


class Moves:
    """A transfer whose parts are steps of whichever stream is current."""

    num_layers = LAYERS

    def __init__(
        self, device: Device, move: Callable[[int], None], deliver: Callable[[int], None] = lambda _: None
    ) -> None:
        self._device, self._move, self._deliver = device, move, deliver

    def move(self, layer: int) -> None:
        self._device.current.queue.append(lambda: self._move(layer))

    def deliver(self, layer: int) -> None:
        self._device.current.queue.append(lambda: self._deliver(layer))

    def run(self, layer: int) -> None:
        self.move(layer)
        self.deliver(layer)


@settings(max_examples=200, deadline=None)
@given(
    passes=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=4),
    arrived=st.integers(0, LAYERS),
    seed=st.integers(0, 2**32),
)
def test_no_order_of_the_streams_shows_a_layer_before_its_load_or_loses_a_save(
    passes: list[tuple[bool, bool]], arrived: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(seed)
        stream = device.patched(patch)
        blocks, pinned = ["" for _ in range(LAYERS)], [True]
        records, num_loads = [["" for _ in range(LAYERS)] for _ in passes], 0
        in_memory = [arrived]
        for number, (loads, saves) in enumerate(passes):

            def load(layer: int, number: int = number) -> None:
                assert pinned[0], "a record was given back before it was read"
                blocks[layer] += f"loaded {number}"

            def forward(layer: int, number: int = number, loads: bool = loads) -> None:
                assert blocks[layer] == (f"loaded {number}" if loads else "")
                blocks[layer] = f"computed {number}.{layer}"

            def reuse(layer: int) -> None:
                blocks[layer] = ""

            def arrive(layer: int) -> None:
                in_memory[0] = max(in_memory[0], layer + 1)

            slots = ["" for _ in range(SLOTS)]

            def collect(layer: int, slots: list[str] = slots) -> None:
                slots[layer % SLOTS] = blocks[layer]

            def deliver(layer: int, slots: list[str] = slots, number: int = number) -> None:
                records[number][layer] = slots[layer % SLOTS]

            computing: Any = Moves(device, forward)
            if loads:
                scatter: Any = Moves(device, load)
                stream.start(scatter, arrive, lambda layer: layer < in_memory[0])
            gather: Any = Moves(device, collect, deliver)
            for layer in range(LAYERS):
                if loads:
                    stream.need(layer)
                    num_loads += 1
                computing.move(layer)
                if saves:
                    stream.save(gather, layer)
                device.computing.queue.append(lambda layer=layer: reuse(layer))
        stream.synchronize()
        seconds = stream.take_load_s()
        pinned[0] = False
        assert 0.002 * num_loads <= seconds < 0.002 * num_loads + 1
        for number, (_, saves) in enumerate(passes):
            assert records[number] == [f"computed {number}.{n}" if saves else "" for n in range(LAYERS)]
        device.run(until=lambda: not any(one.queue for one in device.streams))


def test_what_has_arrived_is_loaded_ahead_of_the_layer_that_needs_it() -> None:
    with pytest.MonkeyPatch.context() as patch:
        device = Device(0)
        stream, loaded = device.patched(patch), list[int]()
        scatter: Any = Moves(device, loaded.append)
        stream.start(scatter, lambda layer: None, lambda layer: layer < 3)
        device.run(until=lambda: not any(one.queue for one in device.streams))
        assert loaded == [0, 1, 2]
        stream.need(4)
        stream.synchronize()
        assert loaded == [0, 1, 2, 3, 4]


def test_on_the_cpu_everything_is_done_when_it_is_due() -> None:
    done: list[str] = []
    stream = LayerStream.on(torch.device("cpu"))
    assert type(stream) is LayerStream

    class Scatter:
        def run(self, layer: int) -> None:
            done.append(f"run {layer}")
            time.sleep(0.05)

    scatter: Any = Scatter()
    before = stream.clock()
    stream.start(scatter, lambda layer: done.append(f"arrived {layer}"), lambda layer: False)
    assert done == []
    stream.need(1)
    stream.save(scatter, 0)
    assert done == ["arrived 1", "run 1", "run 0"]
    assert stream.clock() - before < time.perf_counter() - before - 0.04, "a load does not count as computing"
    stream.synchronize()
    assert stream.take_load_s() >= 0.05
    assert stream.take_load_s() == 0.0
