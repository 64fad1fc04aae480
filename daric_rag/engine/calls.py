"""What a call of `DaricEngine` does inside the engine's event loop: from a prompt to vLLM and back.

The loop is also where vLLM hands out the tokens of every stream, so texts are recognised and tokenised in a
thread beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from daric_rag.config import DaricConfig
from daric_rag.engine.active_profile import ActiveProfile
from daric_rag.engine.calibrating import Calibrator
from daric_rag.engine.event_loop import gather
from daric_rag.engine.fingerprint import root_fields
from daric_rag.engine.idle_warming import IdleWarming
from daric_rag.engine.input_processor import InputProcessor, ProcessedPrompt, Prompt
from daric_rag.engine.launch import launch
from daric_rag.engine.metrics import RequestMetrics, Totals, over_ranks
from daric_rag.engine.profile import Profile, model_key
from daric_rag.engine.requests import (
    build_request,
    calibration_request,
    checked_adapter,
    is_one_prompt,
    warm_request,
)
from daric_rag.engine.result import Completion, GenerationResult, StreamChunk, WarmResult, build_metrics
from daric_rag.engine.warming import Warming
from daric_rag.errors import DaricError, EngineClosedError
from daric_rag.prompt import Content, items_of
from daric_rag.recognition import Recognizer, split_by_matches

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")


class Calls:
    """The coroutines behind the engine's methods, `start` before all others, and all in one event loop."""

    processor: InputProcessor
    active_profile: ActiveProfile
    recognizer: Recognizer | None = None

    def __init__(self, config: DaricConfig) -> None:
        self._config = config
        self._llm: AsyncLLM | None = None
        self._totals = Totals()
        self._counter = itertools.count()
        self._prefix = f"daric-{os.getpid()}-{id(self):x}"
        self._closed = False
        self._adapters: set[tuple[str, int, str]] = set()
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="daric-texts")
        self._idle_warming = IdleWarming(
            lambda: not self._open.get_num_unfinished_requests(),
            lambda chunk, namespace, adapter: self._warm_one(
                chunk, self._config.override(namespace=namespace), adapter
            ),
        )

    async def start(self, model: str, engine_args: dict[str, Any]) -> AsyncLLM:
        """Start vLLM with its processes; raises what `launch` raises."""
        try:
            # No variable of this frame holds vLLM's object, see `launch`.
            self._llm = launch(model, self._config, engine_args)
        except RuntimeError as error:
            raise DaricError(
                f"vLLM did not start with {model!r}; its own messages say why: {error}"
            ) from error
        model_config = self._llm.model_config
        self.processor = InputProcessor(
            self._llm.get_tokenizer(),
            self._llm.vllm_config.cache_config.block_size,
            model_config.max_model_len,
            model_config.get_vocab_size(),
            self._config.padding,
        )
        if self._config.recognition:
            self.recognizer = Recognizer(max_bytes=self._config.recognition_bytes)
        await self._open_profile(model)
        return self._llm

    async def _open_profile(self, model: str) -> None:
        vllm_config, config = self._open.vllm_config, self._config
        calibrator = Calibrator(
            self.processor,
            config,
            self._calibrate_one,
            self._call_ranks,
            min(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.max_model_len),
        )
        self.active_profile = ActiveProfile(
            calibrator, config, model, lambda: model_key(root_fields(vllm_config, config))
        )
        await self.active_profile.open()

    async def calibrate(self, documents: Sequence[Content], progress: bool | None) -> Profile:
        """Make the model's profile of documents and take it up."""
        documents = items_of("documents", documents, "a sequence of documents")
        async with self._errors():
            return await self.active_profile.calibrate(documents, progress)

    async def generate(
        self, prompts: Any, params: Any, lora_request: Any, options: dict[str, Any]
    ) -> GenerationResult | list[GenerationResult]:
        """Answer one prompt, or all of a list."""
        started = time.perf_counter()
        config = self._config.override(**options)
        adapter = await self._adapter(lora_request)
        profile = self.active_profile.digest(config, adapter)
        if is_one_prompt(prompts):
            processed = await self._process(prompts, config)
            request = build_request(processed, params, config, stream=False, profile=profile)
            return await self._answer(processed, request, adapter, started)
        many = list(prompts)
        each = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"params: {len(each)} given for {len(many)} prompts; give one, or one for each")
        # All prompts and parameters are checked before any request is scheduled.
        processed_prompts = [await self._process(prompt, config) for prompt in many]
        requests = [
            build_request(processed, one, config, stream=False, profile=profile)
            for processed, one in zip(processed_prompts, each, strict=True)
        ]
        answers = [
            self._answer(processed, request, adapter, started)
            for processed, request in zip(processed_prompts, requests, strict=True)
        ]
        return await gather(answers)

    async def stream(
        self, prompt: Prompt, params: Any, lora_request: Any, options: dict[str, Any]
    ) -> AsyncIterator[StreamChunk]:
        """Answer one prompt piece by piece."""
        started = time.perf_counter()
        config = self._config.override(**options)
        adapter = await self._adapter(lora_request)
        processed = await self._process(prompt, config)
        profile = self.active_profile.digest(config, adapter)
        request = build_request(processed, params, config, stream=True, profile=profile)
        ttft = None
        count = 0
        async for output in self._submit_to_vllm(*request, self._new_id(), adapter):
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

    async def warm(
        self,
        documents: Sequence[Content],
        progress: bool | None,
        namespace: str | None,
        lora_request: Any,
    ) -> WarmResult:
        """Compute and store the KV of documents, a bounded number of them at once."""
        config = self._config if namespace is None else self._config.override(namespace=namespace)
        adapter = await self._adapter(lora_request)
        documents = items_of("documents", documents, "a sequence of documents")
        warming = Warming(
            self.processor,
            self.recognizer,
            self._in_thread,
            lambda chunk: self._warm_one(chunk, config, adapter),
        )
        return await warming.run(documents, progress)

    async def stats(self) -> dict[str, Any]:
        """Counters of this process and of the first worker's store."""
        async with self._errors():
            stores = await self._call_ranks("daric_stats")
        unfinished = self._open.get_num_unfinished_requests()
        return {**self._totals.to_dict(), "unfinished_requests": unfinished, "store": over_ranks(stores)}

    async def _call_ranks(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What each rank's worker returns. Whoever keeps this keeps nothing of vLLM's, see `_open`."""
        results: list[Any] = await self._open.collective_rpc(method, args=args)
        return results

    async def shut_down(self, timeout: float) -> None:
        """End vLLM's processes within `timeout` seconds: time to write what the disk tier holds in memory."""
        self._closed = True
        self._texts.shutdown(wait=False, cancel_futures=True)
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=timeout)

    @property
    def _open(self) -> AsyncLLM:
        # vLLM's object is let go at the end: it would shut down again when the interpreter takes it away, with
        # half of it gone already.
        if self._llm is None:
            raise EngineClosedError("the engine was closed; make a new DaricEngine")
        return self._llm

    # ---- texts to tokens ----

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what reads texts beside the loop; one call at a time, in the order of arrival."""
        try:
            future = self._texts.submit(function, *arguments)
        except RuntimeError as error:
            # The thread ends with the engine, or before it when the interpreter does.
            raise EngineClosedError("the engine was closed; make a new DaricEngine") from error
        async with self._errors():
            return await asyncio.wrap_future(future)

    async def _process(self, prompt: Prompt, config: DaricConfig) -> ProcessedPrompt:
        split = self._split_known if self.recognizer is not None else None
        return await self._in_thread(self.processor.process, prompt, config, split)

    def _split_known(self, text: str) -> list[tuple[str, bool]]:
        """Cut a text at the registered documents in it."""
        assert self.recognizer is not None
        return split_by_matches(text, self.recognizer.find(text))

    # ---- one request ----

    async def _answer(
        self, processed: ProcessedPrompt, request: tuple[Any, SamplingParams], adapter: Any, started: float
    ) -> GenerationResult:
        ttft = None
        # For n > 1 vLLM tells of one completion at a time.
        completions: dict[int, Completion] = {}
        final: RequestOutput | None = None
        async for output in self._submit_to_vllm(*request, self._new_id(), adapter):
            if ttft is None:
                ttft = time.perf_counter() - started
            completions.update((item.index, Completion.of(item)) for item in output.outputs)
            final = output
        if final is None:
            raise DaricError("the engine returned no output for a request")
        ordered = tuple(completions[index] for index in sorted(completions))
        num_tokens = sum(len(item.token_ids) for item in ordered)
        metrics = self._metrics(processed, final, ttft or 0.0, num_tokens)
        return GenerationResult(final.request_id, ordered, metrics, processed.token_ids)

    async def _warm_one(self, chunk: ProcessedPrompt, config: DaricConfig, adapter: Any) -> RequestMetrics:
        request_id = self._new_id()
        profile = self.active_profile.digest(config, adapter)
        request = warm_request(chunk, config, request_id, profile)
        final = await self._last_output(*request, request_id, adapter)
        return build_metrics(chunk, final.kv_transfer_params, 0, 0.0, 0)

    async def _calibrate_one(self, group: ProcessedPrompt, part: int) -> None:
        request_id = self._new_id()
        await self._last_output(*calibration_request(group, part, request_id), request_id)

    async def _last_output(
        self, prompt: Any, sampling: SamplingParams, request_id: str, adapter: Any = None
    ) -> RequestOutput:
        final = None
        async for output in self._submit_to_vllm(prompt, sampling, request_id, adapter):
            final = output
        if final is None:
            raise DaricError("the engine returned no output for a request without an answer")
        return final

    async def _adapter(self, lora_request: Any) -> Any:
        """The checked adapter of a call, loaded before its first request.

        One that cannot be loaded would end the engine's process if that were found out in the middle of a step.
        """
        adapter = checked_adapter(lora_request)
        if adapter is None:
            return None
        # vLLM compares adapters by their name alone.
        loaded = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if adapter.load_inplace or loaded not in self._adapters:
            async with self._errors():
                try:
                    await self._open.add_lora(adapter)
                except Exception as error:
                    if self._open.errored:
                        raise
                    raise ValueError(f"lora_request: {error}") from error
            self._adapters.add(loaded)
        return adapter

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._counter)}"

    async def _submit_to_vllm(
        self, prompt: Any, sampling: SamplingParams, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[RequestOutput]:
        llm = self._open
        outputs = llm.generate(prompt, sampling, request_id, lora_request=lora_request)
        async with contextlib.aclosing(outputs), self._errors():
            try:
                async for output in outputs:
                    if output.finished:
                        self._idle_warming.after(prompt["prompt_token_ids"], sampling, lora_request, output)
                    yield output
            except Exception:
                # vLLM keeps the record of a request that it could not send.
                if not llm.errored:
                    await llm.abort(request_id)
                raise

    def _metrics(
        self, processed: ProcessedPrompt, output: RequestOutput, ttft: float, completion_tokens: int
    ) -> RequestMetrics:
        cached = output.num_cached_tokens or 0
        metrics = build_metrics(processed, output.kv_transfer_params, cached, ttft, completion_tokens)
        self._totals.add(metrics)
        return metrics

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turn the ways in which vLLM reports a dead engine and a bad request into ours."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except EngineDeadError as error:
            reason = "the engine was closed" if self._closed else "the engine's process died"
            raise EngineClosedError(f"{reason}; make a new DaricEngine") from error
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {error}") from error
        except EngineGenerateError as error:
            raise DaricError(f"vLLM failed to serve the request: {error.__cause__!r}") from error
        except asyncio.CancelledError:
            if self._closed:
                raise EngineClosedError("the engine was closed while a request was running") from None
            raise
