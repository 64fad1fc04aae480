"""`DaricEngine`: vLLM with position-independent KV reuse, as an object with sync and async calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from daric_rag.config import DaricConfig
from daric_rag.engine.calls import Calls
from daric_rag.engine.event_loop import EventLoop
from daric_rag.engine.input_processor import Prompt
from daric_rag.engine.profile import Profile
from daric_rag.engine.result import GenerationResult, StreamChunk, WarmResult
from daric_rag.one_process import OneProcess
from daric_rag.prompt import Content

if TYPE_CHECKING:
    from vllm import SamplingParams

_SHUTDOWN_S = 15.0


class DaricEngine(OneProcess):
    """vLLM whose requests reuse the KV of documents at any position.

    Safe to call from many threads and event loops; concurrent calls are batched by vLLM. Extra keywords are
    vLLM engine arguments. Copies are the engine itself; in a process forked later every call raises `DaricError`.

    >>> with DaricEngine("smollm2-135m", max_model_len=8192) as engine:
    ...     engine.warm(["first document", "second document"])
    ...     result = engine.generate(ChunkedPrompt("system", ["first document", "second document"], "query"))

    Raises `ValueError` for bad options, `UnsupportedModelError` for a model whose keys cannot be re-encoded,
    `CacheUnavailableError` if the cache's directory or Redis cannot be used.
    """

    kind = "engine"

    def __init__(
        self, model: str = "smollm2-135m", config: DaricConfig | None = None, **engine_args: Any
    ) -> None:
        self.check_process()
        self.config = config or DaricConfig()
        self._loop = EventLoop("daric-engine")
        self._calls = Calls(self.config)
        self._end = weakref.finalize(self, _end, self._loop, self._calls, os.getpid())
        self._end.atexit = False
        try:
            self._llm: Any = self._loop.run(self._calls.start(model, engine_args))
        except BaseException:
            self.close()
            raise
        # The last registered runs first: before multiprocessing, whose handler came with the start, waits for the
        # engine's processes to end by themselves.
        atexit.register(self._end)
        self.model_name = model
        self.max_model_len: int = self._llm.model_config.max_model_len
        self.tokenizer: Any = self._llm.get_tokenizer()
        self.processor = self._calls.processor
        self.recognizer = self._calls.recognizer

    # ---- generate ----

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> list[GenerationResult]: ...

    def generate(
        self, prompts: Any, params: Any = None, *, lora_request: Any = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """Answer one prompt or a list of prompts.

        A prompt is a `ChunkedPrompt`, a `ChatPrompt`, a text (with delimiters: chunks) or token ids. `params`:
        `vllm.SamplingParams`, one for all or one each; default greedy, 256 tokens. `options`: overrides of the
        configuration for this call (`reuse`, `selection`, `n_avg`, `ratio`, `mtaf`, `max_fraction`,
        `cache_query`, `namespace`, `profile`).

        Raises `ValueError` for bad options and prompts that are empty or longer than the model's window, before
        anything is scheduled; `EngineClosedError` if the engine was closed or its process died.
        """
        return self._open.run(self._calls.generate(prompts, params, lora_request, options))

    @overload
    async def agenerate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> GenerationResult: ...

    @overload
    async def agenerate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> list[GenerationResult]: ...

    async def agenerate(
        self, prompts: Any, params: Any = None, *, lora_request: Any = None, **options: Any
    ) -> GenerationResult | list[GenerationResult]:
        """`generate`, awaited; cancelling it aborts the requests in the engine."""
        return await self._open.wait(self._calls.generate(prompts, params, lora_request, options))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> Iterator[StreamChunk]:
        """Yield the answer of one prompt piece by piece; the last chunk carries the metrics.

        Leaving the loop early aborts the request. Raises what `generate` raises, at the first step.
        """
        yield from self._open.iterate(self._calls.stream(prompt, params, lora_request, options))

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for an event loop; closing the iterator aborts the request."""
        chunks = self._open.aiterate(self._calls.stream(prompt, params, lora_request, options))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    # ---- warm ----

    def warm(
        self,
        documents: Sequence[Content],
        *,
        progress: bool | None = None,
        namespace: str | None = None,
        lora_request: Any = None,
    ) -> WarmResult:
        """Compute and store the independent KV of documents, batched, and register their texts for recognition.

        Documents that are stored already cost a look-up. `progress`: None shows a bar on a terminal.
        `namespace` and `lora_request` (a `vllm.lora.request.LoRARequest`): for whose requests; the KV of another
        namespace or adapter is never used. Raises
        `ValueError` for a document longer than the model's window, before anything is computed.
        """
        return self._open.run(self._calls.warm(documents, progress, namespace, lora_request))

    async def awarm(
        self,
        documents: Sequence[Content],
        *,
        progress: bool | None = None,
        namespace: str | None = None,
        lora_request: Any = None,
    ) -> WarmResult:
        """`warm`, awaited."""
        return await self._open.wait(self._calls.warm(documents, progress, namespace, lora_request))

    # ---- calibrate ----

    def calibrate(self, documents: Sequence[Content], *, progress: bool | None = None) -> Profile:
        """Fit the correction of stored KV on documents like those to come, keep it for this model, and use it.

        Documents only, no questions: they are computed alone and in each other's context. Every layer's gain is
        measured on documents that were held back; what does not gain is left alone. KV that was stored before is
        not used any more. At least 8 documents with 1,500 tokens together, better 8,000. `progress`: None shows a
        bar on a terminal.

        Raises `ValueError` for too few documents, `CacheUnavailableError` if the profile cannot be written.
        """
        return self._open.run(self._calls.calibrate(documents, progress))

    async def acalibrate(self, documents: Sequence[Content], *, progress: bool | None = None) -> Profile:
        """`calibrate`, awaited."""
        return await self._open.wait(self._calls.calibrate(documents, progress))

    @property
    def profile(self) -> Profile | None:
        """What corrects the KV of documents in this engine; None: nothing does."""
        return self._calls.active_profile.profile

    def register(self, texts: Sequence[str]) -> None:
        """Let `texts` be recognised as documents in plain text prompts; costs memory, no computation."""
        self.check_process()
        if self.recognizer is not None:
            self.recognizer.register(texts)

    # ---- state ----

    def stats(self) -> dict[str, Any]:
        """Cumulative counters: requests, tokens by source, seconds by part, and the store's (bytes, hits)."""
        return self._open.run(self._calls.stats())

    def close(self) -> None:
        """End the engine's processes; unfinished calls raise `EngineClosedError`. Safe to call twice.

        Happens by itself at the end of the interpreter, and when nobody holds the engine any more. In a forked
        process it does nothing: the engine is its parent's.
        """
        if not self.is_elsewhere:
            self._end()
            atexit.unregister(self._end)
            # vLLM's object would shut down again when the interpreter takes it away, with half of it gone already.
            self._llm = None

    @property
    def closed(self) -> bool:
        """Whether the engine can serve no more requests."""
        return not self._end.alive or self.is_elsewhere or bool(self._llm.errored)

    def __enter__(self) -> DaricEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _open(self) -> EventLoop:
        """The way into the engine's event loop, as long as there is somebody to answer."""
        self.check_process()
        return self._loop


def _end(loop: EventLoop, calls: Calls, process: int) -> None:
    """End an engine that was closed, or that nobody can reach any more."""
    if os.getpid() != process:
        return
    if loop.is_current:
        # Whoever cleans up memory may be the loop's own thread, which cannot wait for itself.
        threading.Thread(target=_end, args=(loop, calls, process)).start()
        return
    try:
        with contextlib.suppress(Exception):
            loop.submit(calls.shut_down(_SHUTDOWN_S)).result(timeout=_SHUTDOWN_S + 15)
    finally:
        loop.stop()
