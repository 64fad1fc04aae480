"""Callers of a loop in another thread get their answer or are told that it ended; nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from daric_rag.engine.event_loop import EventLoop
from daric_rag.errors import DaricError, EngineClosedError

PATIENCE_S = 20.0


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    started = EventLoop("test-loop")
    yield started
    started.stop()


async def answer() -> int:
    await asyncio.sleep(0)
    return 7


async def count(to: int, cancelled: threading.Event | None = None) -> AsyncIterator[int]:
    """0, 1, … and then nothing more, for ever."""
    try:
        for number in range(to):
            yield number
        await asyncio.Event().wait()
    finally:
        if cancelled is not None:
            cancelled.set()


async def three() -> AsyncIterator[int]:
    for number in range(3):
        yield number


async def fail() -> AsyncIterator[int]:
    yield 0
    raise ValueError("no more")


async def listed(items: AsyncIterator[int]) -> list[int]:
    return [item async for item in items]


def test_answers_reach_threads_and_other_loops(loop: EventLoop) -> None:
    assert loop.run(answer()) == 7
    assert asyncio.run(loop.wait(answer())) == 7
    assert list(loop.iterate(three())) == [0, 1, 2]
    assert asyncio.run(listed(loop.aiterate(three()))) == [0, 1, 2]


def test_errors_reach_them_too(loop: EventLoop) -> None:
    with pytest.raises(ValueError, match="no more"):
        list(loop.iterate(fail()))
    with pytest.raises(ValueError, match="no more"):
        asyncio.run(listed(loop.aiterate(fail())))


def test_leaving_an_iteration_cancels_it(loop: EventLoop) -> None:
    for _ in range(2):
        cancelled = threading.Event()
        items = loop.iterate(count(5, cancelled))
        assert next(items) == 0
        items.close()  # type: ignore[attr-defined]
        assert cancelled.wait(PATIENCE_S)


def test_a_synchronous_call_in_the_loop_is_refused(loop: EventLoop) -> None:
    async def call() -> None:
        loop.run(answer())

    with pytest.raises(DaricError, match="own event loop"):
        loop.run(call())


async def for_ever() -> None:
    await asyncio.Event().wait()


async def waiting_in_another_loop(loop: EventLoop) -> None:
    await loop.wait(for_ever())


async def iterating_in_another_loop(loop: EventLoop) -> None:
    await listed(loop.aiterate(count(2)))


WAITING: dict[str, Callable[[EventLoop], object]] = {
    "run": lambda loop: loop.run(for_ever()),
    "wait": lambda loop: asyncio.run(waiting_in_another_loop(loop)),
    "iterate": lambda loop: list(loop.iterate(count(2))),
    "aiterate": lambda loop: asyncio.run(iterating_in_another_loop(loop)),
}


@pytest.mark.parametrize("how", WAITING)
def test_whoever_calls_while_the_loop_stops_is_told(how: str) -> None:
    """Callers that wait already, that come at the very moment, and that come later."""
    loop = EventLoop("test-loop")
    outcomes: list[BaseException | object] = []
    stopping = threading.Event()

    def call() -> None:
        while True:
            last_round = stopping.is_set()
            try:
                outcomes.append(WAITING[how](loop))
            except BaseException as error:
                outcomes.append(error)
            if last_round:
                return

    callers = [threading.Thread(target=call, daemon=True) for _ in range(8)]
    for caller in callers[:4]:
        caller.start()
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    for caller in callers[4:]:
        caller.start()
    stopper.join(PATIENCE_S)
    stopping.set()
    for caller in callers:
        caller.join(PATIENCE_S)
    assert not any(caller.is_alive() for caller in callers)
    assert {type(outcome) for outcome in outcomes} == {EngineClosedError}
