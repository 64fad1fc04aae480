"""Chunks are warmed one at a time, only while nothing else runs, and each once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from daric_rag.engine import idle_warming
from daric_rag.engine.idle_warming import IdleWarming
from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY
from daric_rag.errors import EngineClosedError

PROMPT = list(range(100))


class Warming:
    """An engine that is idle or not, and keeps what it was asked to warm."""

    def __init__(self) -> None:
        self.idle = False
        self.warmed: list[tuple[list[int], str]] = []
        self.warming = IdleWarming(lambda: self.idle, self._warm)

    async def _warm(self, chunk: ProcessedPrompt, namespace: str, adapter: Any) -> None:
        if chunk.token_ids[0] == 99:
            raise EngineClosedError("gone")
        self.warmed.append((chunk.token_ids, namespace))

    def ended(self, *unstored: tuple[int, int], namespace: str = "") -> None:
        output = SimpleNamespace(kv_transfer_params={EXTRA_ARGS_KEY: {"unstored": list(unstored)}})
        sampling = SimpleNamespace(extra_args={EXTRA_ARGS_KEY: {"namespace": namespace}})
        self.warming.after(PROMPT, sampling, None, output)

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.warmed) < count:
                await asyncio.sleep(0.01)


async def test_chunks_wait_until_nothing_else_runs() -> None:
    engine = Warming()
    engine.ended((0, 5), (10, 12))
    engine.ended((0, 5))
    await asyncio.sleep(4 * idle_warming._POLL_S)
    assert engine.warmed == []
    engine.idle = True
    await engine.wait_for(2)
    engine.ended((0, 5), namespace="tenant")
    await engine.wait_for(3)
    assert engine.warmed == [(PROMPT[:5], ""), (PROMPT[10:12], ""), (PROMPT[:5], "tenant")]


async def test_one_that_fails_does_not_keep_others() -> None:
    engine = Warming()
    engine.idle = True
    engine.ended((99, 100), (3, 4))
    await engine.wait_for(1)
    assert engine.warmed == [([3], "")]


async def test_no_more_wait_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_warming, "_MAX_WAITING", 3)
    engine = Warming()
    engine.ended((0, 1), (1, 2), (2, 3), (3, 4))
    engine.idle = True
    await engine.wait_for(3)
    await asyncio.sleep(4 * idle_warming._POLL_S)
    assert len(engine.warmed) == 3


async def test_requests_without_reuse_ask_for_nothing() -> None:
    engine = Warming()
    sampling, output = SimpleNamespace(extra_args=None), SimpleNamespace(kv_transfer_params=None)
    engine.warming.after(PROMPT, sampling, None, output)
    assert engine.warming._task is None
