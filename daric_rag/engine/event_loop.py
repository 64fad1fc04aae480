"""An asyncio loop in a thread of its own, and the ways from other threads and loops into it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from daric_rag.errors import DaricError

T = TypeVar("T")

_STOP_S = 10.0


@dataclass(frozen=True)
class _Last(Generic[T]):
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

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine and return at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in a thread; raises `DaricError` in the loop's own thread."""
        self._refuse_own_thread(coroutine)
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C in the caller must not leave the request running.
            future.cancel()
            raise

    async def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine in another event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate in a thread over what an async iterator yields in the loop."""
        handed: queue.Queue[T | _Last[T]] = queue.Queue()
        future = self.submit(_pump(items, handed.put))
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
        handed: asyncio.Queue[T | _Last[T]] = asyncio.Queue()

        def put(item: T | _Last[T]) -> None:
            # The caller's loop may be gone by the time an abandoned stream ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(handed.put_nowait, item)

        future = self.submit(_pump(items, put))
        try:
            while not isinstance(item := await handed.get(), _Last):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            future.cancel()

    def stop(self) -> None:
        """End the thread; what still runs in it is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=_STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _refuse_own_thread(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise DaricError("a synchronous call inside the engine's own event loop would never return")


async def _pump(items: AsyncIterator[T], put: Callable[[T | _Last[T]], None]) -> None:
    try:
        async for item in items:
            put(item)
        put(_Last())
    except BaseException as error:
        put(_Last(error))
        raise


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
