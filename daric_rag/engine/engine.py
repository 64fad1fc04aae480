"""`DaricEngine`: vLLM with position-independent KV reuse, as an object with sync and async calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from daric_rag.config import DaricConfig
from daric_rag.engine.calls import Calls
from daric_rag.engine.event_loop import EventLoop
from daric_rag.engine.input_processor import InputProcessor, Prompt
from daric_rag.engine.launch import launch
from daric_rag.engine.result import GenerationResult, StreamChunk, WarmResult
from daric_rag.errors import DaricError, EngineClosedError
from daric_rag.prompt import Content
from daric_rag.recognition import Recognizer

if TYPE_CHECKING:
    from vllm import SamplingParams

_SHUTDOWN_S = 15.0


class DaricEngine:
    """vLLM whose requests reuse the KV of documents at any position.

    Safe to call from many threads and event loops; concurrent calls are batched by vLLM. Extra keywords are
    vLLM engine arguments.

    >>> with DaricEngine("smollm2-135m", max_model_len=8192) as engine:
    ...     engine.warm(["first document", "second document"])
    ...     result = engine.generate(ChunkedPrompt("system", ["first document", "second document"], "query"))

    Raises `ValueError` for bad options, `UnsupportedModelError` for a model whose keys cannot be re-encoded,
    `CacheUnavailableError` if the cache's directory or Redis cannot be used.
    """

    def __init__(
        self, model: str = "smollm2-135m", config: DaricConfig | None = None, **engine_args: Any
    ) -> None:
        self.config = config or DaricConfig()
        self._closed = False
        self._loop = EventLoop("daric-engine")
        try:
            self._llm: Any = self._loop.run(_launch(model, self.config, engine_args))
        except BaseException:
            self._loop.stop()
            raise
        model_config = self._llm.model_config
        self.model_name = model
        self.max_model_len: int = model_config.max_model_len
        self.tokenizer: Any = self._llm.get_tokenizer()
        self.processor = InputProcessor(
            self.tokenizer,
            self._llm.vllm_config.cache_config.block_size,
            self.max_model_len,
            model_config.get_vocab_size(),
            self.config.padding,
        )
        self.recognizer = (
            Recognizer(max_bytes=self.config.recognition_bytes) if self.config.recognition else None
        )
        self._calls = Calls(self._llm, self.processor, self.recognizer, self.config)

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
        `cache_query`, `namespace`).

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

    def register(self, texts: Sequence[str]) -> None:
        """Let `texts` be recognised as documents in plain text prompts; costs memory, no computation."""
        if self.recognizer is not None:
            self.recognizer.register(texts)

    # ---- state ----

    def stats(self) -> dict[str, Any]:
        """Cumulative counters: requests, tokens by source, seconds by part, and the store's (bytes, hits)."""
        return self._open.run(self._calls.stats())

    def close(self) -> None:
        """End the engine's processes; unfinished calls raise `EngineClosedError`. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            self._loop.submit(self._calls.shut_down(_SHUTDOWN_S)).result(timeout=_SHUTDOWN_S + 15)
        self._loop.stop()
        self._llm = None

    @property
    def closed(self) -> bool:
        """Whether the engine can serve no more requests."""
        return self._closed or bool(self._llm.errored)

    def __enter__(self) -> DaricEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _open(self) -> EventLoop:
        """The way into the engine's event loop, as long as there is somebody to answer."""
        if self._closed:
            raise EngineClosedError("the engine was closed; make a new DaricEngine")
        return self._loop


async def _launch(model: str, config: DaricConfig, engine_args: dict[str, Any]) -> Any:
    try:
        return launch(model, config, engine_args)
    except RuntimeError as error:
        raise DaricError(f"vLLM did not start with {model!r}; its own messages say why: {error}") from error
