"""An asyncio loop in a thread of its own, and the ways from other threads and loops into it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeVar

from daric_rag.errors import DaricError, EngineClosedError

T = TypeVar("T")

_STOP_S = 10.0


@dataclass(frozen=True)
class _Last:
    """The end of a stream on its way to another thread; `error` is what ended it, if anything did."""

    error: BaseException | None = None


class EventLoop:
    """Runs coroutines for callers in any thread and any other event loop.

    A caller that goes away, by Ctrl-C, by cancellation or by closing an iterator, cancels its coroutine.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def is_current(self) -> bool:
        """Whether the caller is in the loop's own thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return at once; raises `EngineClosedError` after `stop`."""
        with self._lock:
            if not self._stopping:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise _closed()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in a thread; raises `DaricError` in the loop's own thread."""
        if self.is_current:
            coroutine.close()
            raise DaricError("a synchronous call inside the engine's own event loop would never return")
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise _closed() from None
        except BaseException:
            # Ctrl-C in the caller must not leave the request running.
            future.cancel()
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in another event loop."""
        future = self.submit(coroutine)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _closed() from None

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate in a thread over what an async iterator yields in the loop."""
        handed: queue.Queue[T | _Last] = queue.Queue()
        future = self._hand_over(items, handed.put)
        try:
            while not isinstance(item := handed.get(), _Last):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    async def aiterate(self, items: AsyncIterator[T]) -> AsyncGenerator[T]:
        """Iterate in another event loop over what an async iterator yields in this one."""
        loop = asyncio.get_running_loop()
        handed: asyncio.Queue[T | _Last] = asyncio.Queue()

        def put(item: T | _Last) -> None:
            # The caller's loop may be gone by the time an abandoned stream ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(handed.put_nowait, item)

        future = self._hand_over(items, put)
        try:
            while not isinstance(item := await handed.get(), _Last):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    def _hand_over(self, items: AsyncIterator[T], put: Callable[[T | _Last], None]) -> Future[None]:
        async def pump() -> None:
            async for item in items:
                put(item)

        future = self.submit(pump())
        # Not at the end of `pump`, which is cancelled before its beginning if the loop stops just now.
        future.add_done_callback(lambda done: put(_Last(_closed() if done.cancelled() else done.exception())))
        return future

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        with self._lock:
            self._stopping = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        self._thread.join(timeout=_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=_STOP_S / 2)
        self._loop.stop()


async def gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; if one fails or the caller is cancelled, cancel the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed; make a new DaricEngine")
