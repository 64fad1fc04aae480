"""Storing, once nothing else runs, what a request could only compute in the context of its prompt.

A missing chunk whose beginning lies in blocks of vLLM's own prefix cache cannot be generated there on its own: those
blocks hold its KV in context, and others may read them. It is computed live, which is exact, and its own KV is left
to be generated when the engine is idle: one generation more, for which nobody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY
from daric_rag.errors import DaricError

_POLL_S = 0.05
# What is not stored for want of idle time is found missing again by the next request over it.
_MAX_WAITING = 256

Warm = Callable[[ProcessedPrompt, str, Any], Awaitable[object]]
"""(chunk, namespace, LoRA adapter) -> its KV is stored."""


class IdleWarming:
    """Warms chunks one at a time whenever `is_idle`; used in one event loop."""

    def __init__(self, is_idle: Callable[[], bool], warm: Warm) -> None:
        self._is_idle = is_idle
        self._warm = warm
        self._waiting: dict[tuple[tuple[int, ...], str, Any], None] = {}
        self._task: asyncio.Task[None] | None = None

    def after(self, token_ids: list[int], sampling: Any, adapter: Any, output: Any) -> None:
        """A request has ended with `output`: have the chunks stored that its report names."""
        report = (output.kv_transfer_params or {}).get(EXTRA_ARGS_KEY) or {}
        namespace = (sampling.extra_args or {}).get(EXTRA_ARGS_KEY, {}).get("namespace", "")
        for start, end in report.get("unstored", ()):
            if len(self._waiting) < _MAX_WAITING:
                self._waiting[tuple(token_ids[start:end]), namespace, adapter] = None
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self._waiting:
            await asyncio.sleep(_POLL_S)
            if self._is_idle():
                tokens, namespace, adapter = wanted = next(iter(self._waiting))
                chunk = ProcessedPrompt(list(tokens), ((0, len(tokens)),), (False,))
                with contextlib.suppress(DaricError):  # the engine ended
                    await self._warm(chunk, namespace, adapter)
                del self._waiting[wanted]
