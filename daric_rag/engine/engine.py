"""`DaricEngine`: vLLM with position-independent KV reuse, as an object with sync and async calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt
from daric_rag.engine.launch import launch
from daric_rag.engine.metrics import RequestMetrics, Totals
from daric_rag.engine.requests import build_request, is_one_prompt, warm_request
from daric_rag.engine.result import Completion, GenerationResult, StreamChunk, WarmResult, build_metrics
from daric_rag.errors import DaricError, EngineClosedError
from daric_rag.progress import progress_bar
from daric_rag.prompt import Content
from daric_rag.recognition import Recognizer, split_by_matches

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

T = TypeVar("T")
# What a stream hands from the engine's thread to its caller; None ends it.
_StreamItem = StreamChunk | BaseException | None

# Documents of `warm` that are in the engine at once: enough to fill its batches, few enough to stay responsive.
_WARM_CONCURRENCY = 32
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
        self._counter = itertools.count()
        self._prefix = f"daric-{os.getpid()}-{id(self):x}"
        self._closed = False
        self._totals = Totals()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="daric-engine", daemon=True)
        self._thread.start()
        try:
            self._llm: Any = self._run(self._launch(model, engine_args))
        except BaseException:
            self._stop_loop()
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

    async def _launch(self, model: str, engine_args: dict[str, Any]) -> Any:
        try:
            return launch(model, self.config, engine_args)
        except RuntimeError as error:
            raise DaricError(
                f"vLLM did not start with {model!r}; its own messages say why: {error}"
            ) from error

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
        return self._run(self._generate(prompts, params, lora_request, options))

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
        return await self._await(self._generate(prompts, params, lora_request, options))

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
        chunks: queue.Queue[_StreamItem] = queue.Queue()

        future = self._submit(self._pump(chunks.put, prompt, params, lora_request, options))
        try:
            while (item := chunks.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

    async def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        lora_request: Any = None,
        **options: Any,
    ) -> AsyncIterator[StreamChunk]:
        """`stream` for an event loop; closing the iterator aborts the request."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[_StreamItem] = asyncio.Queue()

        def put(item: _StreamItem) -> None:
            # The caller's loop may be gone by the time an abandoned request ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, item)

        future = self._submit(self._pump(put, prompt, params, lora_request, options))
        try:
            while (item := await chunks.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()

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
        return self._run(self._warm(documents, progress, namespace, lora_request))

    async def awarm(
        self,
        documents: Sequence[Content],
        *,
        progress: bool | None = None,
        namespace: str | None = None,
        lora_request: Any = None,
    ) -> WarmResult:
        """`warm`, awaited."""
        return await self._await(self._warm(documents, progress, namespace, lora_request))

    def register(self, texts: Sequence[str]) -> None:
        """Let `texts` be recognised as documents in plain text prompts; costs memory, no computation."""
        if self.recognizer is not None:
            self.recognizer.register(texts)

    # ---- state ----

    def stats(self) -> dict[str, Any]:
        """Cumulative counters: requests, tokens by source, seconds by part, and the store's (bytes, hits)."""
        return self._run(self._stats())

    def close(self) -> None:
        """End the engine's processes; unfinished calls raise `EngineClosedError`. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(timeout=_SHUTDOWN_S + 15)
        self._stop_loop()
        # vLLM's object would shut down again when the interpreter takes it away, with half of it gone already.
        self._llm = None

    async def _shut_down(self) -> None:
        # Time to write what the disk tier still holds in memory.
        self._llm.shutdown(timeout=_SHUTDOWN_S)
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=5) if others else None

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()

    @property
    def closed(self) -> bool:
        """Whether the engine can serve no more requests."""
        return self._closed or bool(self._llm.errored)

    def __enter__(self) -> DaricEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside the engine's event loop ----

    async def _generate(
        self, prompts: Any, params: Any, lora_request: Any, options: dict[str, Any]
    ) -> GenerationResult | list[GenerationResult]:
        started = time.perf_counter()
        config = self.config.override(**options)
        if is_one_prompt(prompts):
            processed = self._process(prompts, config)
            return await self._answer(processed, params, lora_request, config, started)
        many = list(prompts)
        each = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"params: {len(each)} given for {len(many)} prompts; give one, or one for each")
        # All prompts are checked before any is scheduled.
        processed_prompts = [self._process(prompt, config) for prompt in many]
        answers = [
            self._answer(processed, one, lora_request, config, started)
            for processed, one in zip(processed_prompts, each, strict=True)
        ]
        return await _gather(answers)

    def _process(self, prompt: Prompt, config: DaricConfig) -> ProcessedPrompt:
        if self._closed:
            raise EngineClosedError("the engine was closed")
        split = self._split_known if self.recognizer is not None else None
        return self.processor.process(prompt, config, split)

    def _split_known(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text at the registered documents in it."""
        assert self.recognizer is not None
        return split_by_matches(text, self.recognizer.find(text))

    async def _answer(
        self,
        processed: ProcessedPrompt,
        params: Any,
        lora_request: Any,
        config: DaricConfig,
        started: float,
    ) -> GenerationResult:
        ttft = None
        # For n > 1 vLLM tells of one completion at a time.
        completions: dict[int, Completion] = {}
        final: RequestOutput | None = None
        async for output in self._outputs(processed, params, lora_request, config, stream=False):
            if ttft is None:
                ttft = time.perf_counter() - started
            completions.update((item.index, _completion(item)) for item in output.outputs)
            final = output
        if final is None:
            raise DaricError("the engine returned no output for a request")
        ordered = tuple(completions[index] for index in sorted(completions))
        num_tokens = sum(len(item.token_ids) for item in ordered)
        metrics = self._metrics(processed, final, ttft or 0.0, num_tokens)
        return GenerationResult(final.request_id, ordered, metrics, processed.token_ids)

    async def _pump(
        self,
        put: Callable[[_StreamItem], None],
        prompt: Prompt,
        params: Any,
        lora_request: Any,
        options: dict[str, Any],
    ) -> None:
        """Hand a stream's chunks to another thread, then None, or the error that ended it."""
        try:
            async for chunk in self._stream(prompt, params, lora_request, options):
                put(chunk)
            put(None)
        except BaseException as error:
            put(error)
            raise

    async def _stream(
        self, prompt: Prompt, params: Any, lora_request: Any, options: dict[str, Any]
    ) -> AsyncIterator[StreamChunk]:
        started = time.perf_counter()
        config = self.config.override(**options)
        processed = self._process(prompt, config)
        ttft = None
        count = 0
        async for output in self._outputs(processed, params, lora_request, config, stream=True):
            if ttft is None:
                ttft = time.perf_counter() - started
            for number, item in enumerate(output.outputs):
                count += len(item.token_ids)
                is_last = output.finished and number == len(output.outputs) - 1
                yield StreamChunk(
                    request_id=output.request_id,
                    index=item.index,
                    text=item.text,
                    token_ids=tuple(item.token_ids),
                    finish_reason=item.finish_reason,
                    stop_reason=item.stop_reason,
                    logprobs=item.logprobs,
                    metrics=self._metrics(processed, output, ttft, count) if is_last else None,
                )

    async def _outputs(
        self,
        processed: ProcessedPrompt,
        params: Any,
        lora_request: Any,
        config: DaricConfig,
        *,
        stream: bool,
    ) -> AsyncIterator[RequestOutput]:
        prompt, sampling = build_request(processed, params, config, stream=stream)
        async for output in self._submit_to_vllm(prompt, sampling, self._new_id(), lora_request):
            yield output

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._counter)}"

    async def _submit_to_vllm(
        self, prompt: Any, sampling: SamplingParams, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[RequestOutput]:
        outputs = self._llm.generate(prompt, sampling, request_id, lora_request=lora_request)
        async with contextlib.aclosing(outputs), self._errors():
            async for output in outputs:
                yield output

    def _metrics(
        self, processed: ProcessedPrompt, output: RequestOutput, ttft: float, completion_tokens: int
    ) -> RequestMetrics:
        cached = output.num_cached_tokens or 0
        metrics = build_metrics(processed, output.kv_transfer_params, cached, ttft, completion_tokens)
        self._totals.add(metrics)
        return metrics

    async def _warm(
        self,
        documents: Sequence[Content],
        progress: bool | None,
        namespace: str | None,
        lora_request: Any,
    ) -> WarmResult:
        if isinstance(documents, str | bytes):
            raise ValueError("documents: a sequence of documents is expected, one text was given")
        started = time.perf_counter()
        config = self.config if namespace is None else self.config.override(namespace=namespace)
        self.register([document for document in documents if isinstance(document, str)])
        chunks = [self.processor.warm_chunk(document) for document in documents]
        # The same document twice is computed once.
        unique = {tuple(chunk.token_ids): chunk for chunk in chunks if chunk.token_ids}
        gate = asyncio.Semaphore(_WARM_CONCURRENCY)

        with progress_bar(len(unique), "warming", "document", progress) as bar:

            async def one(chunk: ProcessedPrompt) -> RequestMetrics:
                async with gate:
                    metrics = await self._warm_one(chunk, config, lora_request)
                    bar.update()
                    return metrics

            done = await _gather([one(chunk) for chunk in unique.values()])
        return WarmResult(
            documents=len(done),
            tokens=sum(metrics.prompt_tokens for metrics in done),
            generated_tokens=sum(metrics.generated_tokens for metrics in done),
            cached_documents=sum(metrics.generated_tokens == 0 for metrics in done),
            empty=sum(not chunk.token_ids for chunk in chunks),
            seconds=time.perf_counter() - started,
        )

    async def _warm_one(
        self, chunk: ProcessedPrompt, config: DaricConfig, lora_request: Any
    ) -> RequestMetrics:
        request_id = self._new_id()
        prompt, sampling = warm_request(chunk, config, request_id)
        final = None
        async for output in self._submit_to_vllm(prompt, sampling, request_id, lora_request):
            final = output
        if final is None:
            raise DaricError("the engine returned no output for a document to warm")
        return build_metrics(chunk, final.kv_transfer_params, 0, 0.0, 0)

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turn the ways in which vLLM reports a dead engine into ours."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            reason = "the engine was closed" if self._closed else "the engine's process died"
            raise EngineClosedError(f"{reason}; make a new DaricEngine") from error
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("the engine was closed while a request was running") from None
            raise

    async def _stats(self) -> dict[str, Any]:
        async with self._errors():
            stores = await self._llm.collective_rpc("daric_stats")
        unfinished = self._llm.get_num_unfinished_requests()
        return {**self._totals.to_dict(), "unfinished_requests": unfinished, "store": stores[0]}

    # ---- between threads ----

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        if self._closed:
            coroutine.close()
            raise EngineClosedError("the engine was closed; make a new DaricEngine")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise DaricError("a synchronous call inside the engine's own event loop would never return")
        future = self._submit(coroutine)
        try:
            result: T = future.result()
            return result
        except BaseException:
            # Ctrl-C in the caller must not leave the request running.
            future.cancel()
            raise

    async def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        result: T = await asyncio.wrap_future(self._submit(coroutine))
        return result


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; if one fails or the caller is cancelled, cancel the rest."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _completion(item: Any) -> Completion:
    return Completion(
        index=item.index,
        text=item.text,
        token_ids=tuple(item.token_ids),
        finish_reason=item.finish_reason,
        stop_reason=item.stop_reason,
        logprobs=item.logprobs,
        cumulative_logprob=item.cumulative_logprob,
    )
