"""Running streams, and the moments at which their tokens came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

from daric_rag import DaricEngine


@asynccontextmanager
async def streams(engine: DaricEngine, count: int) -> AsyncIterator[list[list[float]]]:
    """Requests without documents that decode until the block ends; per request the moments of its tokens."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=7000, temperature=0.0, ignore_eos=True)
    moments: list[list[float]] = [[] for _ in range(count)]

    async def one(number: int) -> None:
        async for chunk in engine.astream(f"Tell me story number {number}.", params):
            moments[number] += [time.perf_counter()] * len(chunk.token_ids)

    tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
    try:
        while not all(moments):
            await asyncio.sleep(0.05)
            _raise_errors(tasks)
        yield moments
        if any(task.done() for task in tasks):
            raise RuntimeError("a stream reached its end before what was measured beside it did")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _raise_errors(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def gaps(moments: Sequence[Sequence[float]], start: float, end: float) -> list[float]:
    """Seconds between tokens, of all gaps that overlap `[start, end]`."""
    return [
        float(later - earlier)
        for times in moments
        for earlier, later in pairwise(times)
        if later > start and earlier < end
    ]
