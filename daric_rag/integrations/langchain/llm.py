"""`DaricLLM`: a LangChain completion model over a `DaricEngine`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseLLM, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import BaseMessage
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue
from pydantic import ConfigDict

from daric_rag.engine.input_processor import Prompt
from daric_rag.engine.result import GenerationResult, StreamChunk
from daric_rag.integrations.langchain.messages import artifact_texts, to_chat_prompt, to_text_prompt
from daric_rag.integrations.langchain.model import CALL_OPTIONS, Call, DaricModel
from daric_rag.integrations.langchain.results import chunk_info, completion_info, token_usage, usage
from daric_rag.known_documents import register_documents

# LangChain makes the key of its cache without the options of the call; `_identifying_params` adds them.
_call_options: ContextVar[dict[str, Any] | None] = ContextVar("daric_call_options", default=None)


class _MessagesText(str):
    """The text form of messages that still has the messages: `BaseLLM` passes only strings on."""

    messages: Sequence[BaseMessage]


class _MessagesPrompt(ChatPromptValue):
    """A chat prompt whose text keeps its messages, so that the model's own chat template renders them."""

    def to_string(self) -> str:
        """The text of the messages, for traces and caches."""
        text = _MessagesText(super().to_string())
        text.messages = self.messages
        return text


class DaricLLM(DaricModel, BaseLLM):
    """A completion model that reuses the KV of documents at any position.

    A plain text is a completion; messages are rendered with the model's chat template. Options of a call:
    `documents=[…]` (put before the prompt), the sampling fields, and the options of reuse (`reuse`, `selection`,
    `n_avg`, `ratio`, `mtaf`, `max_fraction`, `cache_query`, `namespace`). A batch is one call of the engine.
    The metrics of a request are under "daric" in `generation_info`.

        llm = DaricLLM(model="smollm2-135m", max_tokens=64)
        llm.invoke("Where is Paris?", documents=["Paris is in France."])

    Raises `ValueError` for unknown or bad options, naming the nearest one.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    @property
    def _llm_type(self) -> str:
        return "daric"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        options = _call_options.get()
        return {**self.identity(), "call": options} if options else self.identity()

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        return _keep_messages(super()._convert_input(model_input))

    def generate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer prompt values in one call of the engine."""
        return super().generate_prompt([_keep_messages(prompt) for prompt in prompts], *args, **kwargs)

    async def agenerate_prompt(self, prompts: list[PromptValue], *args: Any, **kwargs: Any) -> LLMResult:
        """`generate_prompt`, awaited."""
        return await super().agenerate_prompt([_keep_messages(prompt) for prompt in prompts], *args, **kwargs)

    def generate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """Answer texts in one call of the engine."""
        with _options_in_cache_key(kwargs):
            return super().generate(prompts, *args, **kwargs)

    async def agenerate(self, prompts: list[str], *args: Any, **kwargs: Any) -> LLMResult:
        """`generate`, awaited."""
        with _options_in_cache_key(kwargs):
            return await super().agenerate(prompts, *args, **kwargs)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self.start_call(stop, kwargs)
        results = call.engine.generate(
            [_prompt(text, call) for text in prompts], call.params, **call.overrides
        )
        return _llm_result(results, call)

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = await self.astart_call(stop, kwargs)
        each = [_prompt(text, call) for text in prompts]
        return _llm_result(await call.engine.agenerate(each, call.params, **call.overrides), call)

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        call = self.start_call(stop, kwargs, streaming=True)
        stream = call.engine.stream(_prompt(prompt, call), call.params, **call.overrides)
        with contextlib.closing(stream):  # type: ignore[type-var]
            for part in stream:
                chunk = _generation_chunk(part, call)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk, verbose=self.verbose)
                yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        call = await self.astart_call(stop, kwargs, streaming=True)
        stream = call.engine.astream(_prompt(prompt, call), call.params, **call.overrides)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for part in stream:
                chunk = _generation_chunk(part, call)
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk, verbose=self.verbose)
                yield chunk


def _keep_messages(value: PromptValue) -> PromptValue:
    return _MessagesPrompt(messages=value.messages) if isinstance(value, ChatPromptValue) else value


@contextlib.contextmanager
def _options_in_cache_key(kwargs: dict[str, Any]) -> Iterator[None]:
    options = {name: value for name, value in kwargs.items() if name in CALL_OPTIONS}
    token = _call_options.set(options)
    try:
        yield
    finally:
        _call_options.reset(token)


def _prompt(text: str, call: Call) -> Prompt:
    if isinstance(text, _MessagesText) and call.engine.processor.has_chat_template:
        register_documents(artifact_texts(text.messages))
        return to_chat_prompt(text.messages, call.form, call.documents)
    return to_text_prompt(str(text), call.form, call.documents)


def _llm_result(results: Sequence[GenerationResult], call: Call) -> LLMResult:
    generations = [
        [
            Generation(
                text=completion.text,
                generation_info={
                    **completion_info(result, completion, call.model),
                    "usage_metadata": usage(
                        result.metrics, len(completion.token_ids), is_first=completion.index == 0
                    ),
                },
            )
            for completion in result.completions
        ]
        for result in results
    ]
    return LLMResult(
        generations=generations, llm_output={"token_usage": token_usage(results), "model_name": call.model}
    )


def _generation_chunk(part: StreamChunk, call: Call) -> GenerationChunk:
    info = chunk_info(part, call.model)
    if part.metrics is not None:
        info["usage_metadata"] = usage(part.metrics, part.metrics.completion_tokens)
    return GenerationChunk(text=part.text, generation_info=info or None)
