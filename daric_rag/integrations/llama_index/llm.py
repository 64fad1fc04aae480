"""`DaricLLM`: the LlamaIndex language model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from llama_index.core.base.llms.generic_utils import messages_to_prompt as plain_messages
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, MessageRole
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from daric_rag.config import PER_CALL_OPTIONS, DaricConfig, reject_unknown
from daric_rag.integrations.common.shared_engine import get_engine
from daric_rag.integrations.llama_index.calls import (
    Accumulator,
    Answer,
    CallOptions,
    answer,
    call_options,
    chat_response,
    completion_response,
)
from daric_rag.integrations.llama_index.events import watch_retrieval
from daric_rag.integrations.llama_index.prompt_helper import DaricLLMMetadata
from daric_rag.integrations.llama_index.prompts import as_document, chat_prompt
from daric_rag.known_documents import attach_engine
from daric_rag.prompt import ChatPrompt, ChunkedPrompt, has_delimiter

Response = TypeVar("Response", ChatResponse, CompletionResponse)


class DaricLLM(LLM):
    """A local model whose prompts reuse the KV of documents at any position.

    The engine starts at first use and is shared by all objects with the same `model`, `config` and
    `engine_args` (vLLM engine arguments), or is the `engine` given; then `config` is what its calls override.
    What LlamaIndex retrieves is recognised in prompts (`recognise_retrieved`), so an existing query engine
    needs no other change. Responses carry in `raw` the `usage` and, under `daric`, the reuse metrics.

    Every call takes `documents`, the sampling options (`max_tokens`, `stop`, `logprobs`, …), `json_schema`, and
    the reuse options that a call may override (`reuse`, `selection`, `n_avg`, …).

        Settings.llm = DaricLLM()
        VectorStoreIndex.from_documents(documents).as_query_engine().query("…")

    Raises `ValueError` for unknown or bad options, and what `DaricEngine` raises.
    """

    model: str = Field(default="smollm2-135m", description="Embedded model, directory, or hub id.")
    config: DaricConfig | None = Field(default=None, description="Options of the engine.")
    engine: Any = Field(default=None, exclude=True, repr=False, description="An engine to use instead.")
    max_tokens: int = Field(default=256, ge=1, description="Tokens of an answer, at most.")
    temperature: float = Field(default=0.0, ge=0.0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="Nucleus sampling.")
    stop: list[str] | None = Field(default=None, description="Texts at which an answer ends; not part of it.")
    seed: int | None = Field(default=None, description="Seed of sampling.")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments.")
    recognise_retrieved: bool = Field(
        default=True, description="Recognise what any retriever of this process returns."
    )

    _metadata: DaricLLMMetadata | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        reject_unknown(fields, type(self).model_fields, type(self).__name__)
        super().__init__(**fields)
        if self.recognise_retrieved:
            watch_retrieval()

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @classmethod
    def class_name(cls) -> str:
        return "DaricLLM"

    @property
    def metadata(self) -> DaricLLMMetadata:
        """The model's window, kind and tokenizer; starts the engine when read for the first time."""
        if self._metadata is None:
            engine = self._engine()
            self._metadata = DaricLLMMetadata(
                context_window=engine.max_model_len,
                num_output=self.max_tokens,
                is_chat_model=engine.processor.has_chat_template,
                model_name=self.model if self.engine is None else engine.model_name,
                tokenizer=engine.processor.tokenize,
                block_size=engine.config.block_size,
                delimiter=engine.config.delimiter,
            )
        # `max_tokens` may be assigned at any time.
        return self._metadata.model_copy(update={"num_output": self.max_tokens})

    def to_payload(self) -> dict[str, Any]:
        """What events tell about this model; needs no engine."""
        return {"class_name": self.class_name(), "model_name": self.model, **self._sampling()}

    # ---- the eight methods ----

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation."""
        engine, options = self._engine(), self._options(kwargs)
        prompt = self._chat_prompt(engine, messages, options.documents)
        return chat_response(answer(engine.generate(prompt, options.params, **options.engine_options)))

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat`, awaited; cancelling it aborts the request in the engine."""
        engine, options = await self._aengine(), self._options(kwargs)
        prompt = self._chat_prompt(engine, messages, options.documents)
        result = await engine.agenerate(prompt, options.params, **options.engine_options)
        return chat_response(answer(result))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Iterator[ChatResponse]:
        """`chat`, piece by piece; leaving the loop aborts the request in the engine."""
        engine, options = self._engine(), self._options(kwargs)
        prompt = self._chat_prompt(engine, messages, options.documents)
        return _stream(engine, prompt, options, chat_response)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> AsyncIterator[ChatResponse]:
        """`stream_chat` for an event loop: await it, then iterate."""
        engine, options = await self._aengine(), self._options(kwargs)
        prompt = self._chat_prompt(engine, messages, options.documents)
        return _astream(engine, prompt, options, chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Answer a text: as the one message of a chat, or, with `formatted`, continue it as it is."""
        engine, options = self._engine(), self._options(kwargs)
        processed = self._completion_prompt(engine, prompt, formatted, options.documents)
        result = engine.generate(processed, options.params, **options.engine_options)
        return completion_response(answer(result))

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete`, awaited; cancelling it aborts the request in the engine."""
        engine, options = await self._aengine(), self._options(kwargs)
        processed = self._completion_prompt(engine, prompt, formatted, options.documents)
        result = await engine.agenerate(processed, options.params, **options.engine_options)
        return completion_response(answer(result))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Iterator[CompletionResponse]:
        """`complete`, piece by piece; leaving the loop aborts the request in the engine."""
        engine, options = self._engine(), self._options(kwargs)
        processed = self._completion_prompt(engine, prompt, formatted, options.documents)
        return _stream(engine, processed, options, completion_response)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncIterator[CompletionResponse]:
        """`stream_complete` for an event loop: await it, then iterate."""
        engine, options = await self._aengine(), self._options(kwargs)
        processed = self._completion_prompt(engine, prompt, formatted, options.documents)
        return _astream(engine, processed, options, completion_response)

    # ---- structured output: the schema is enforced while the model writes ----

    def structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """Answer with an object of a pydantic class."""
        return super().structured_predict(
            output_cls, prompt, _with_schema(llm_kwargs, output_cls), **prompt_args
        )

    async def astructured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """`structured_predict`, awaited."""
        return await super().astructured_predict(
            output_cls, prompt, _with_schema(llm_kwargs, output_cls), **prompt_args
        )

    def stream_structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """`structured_predict`, with partial objects."""
        return super().stream_structured_predict(
            output_cls, prompt, _with_schema(llm_kwargs, output_cls), **prompt_args
        )

    async def astream_structured_predict(
        self, output_cls: Any, prompt: Any, llm_kwargs: dict[str, Any] | None = None, **prompt_args: Any
    ) -> Any:
        """`stream_structured_predict` for an event loop: await it, then iterate."""
        return await super().astream_structured_predict(
            output_cls, prompt, _with_schema(llm_kwargs, output_cls), **prompt_args
        )

    # ---- inside ----

    def __getstate__(self) -> dict[str, Any]:
        if self.engine is not None:
            # LlamaIndex leaves out what cannot be pickled; without its engine this would be another model.
            self.engine.__reduce__()
        return super().__getstate__()

    def _engine(self) -> Any:
        if self.engine is None:
            return get_engine(self.model, self.config, self.engine_args)
        if self.recognise_retrieved:
            attach_engine(self.engine)
        return self.engine

    async def _aengine(self) -> Any:
        # A first start takes long: not in the event loop.
        return self._engine() if self.engine is not None else await asyncio.to_thread(self._engine)

    def _sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop": self.stop,
            "seed": self.seed,
        }

    def _options(self, options: dict[str, Any]) -> CallOptions:
        chosen: dict[str, Any] = {}
        if self.engine is not None and self.config is not None:
            # That engine has a configuration of its own: of this one the options of a call can apply.
            names = PER_CALL_OPTIONS & self.config.model_fields_set
            chosen = {name: getattr(self.config, name) for name in names}
        return call_options(self._sampling(), {**chosen, **options})

    def _chat_prompt(
        self, engine: Any, messages: Sequence[ChatMessage], documents: Sequence[Any] | None
    ) -> Any:
        own_format = self.messages_to_prompt not in (None, plain_messages)
        if own_format or not engine.processor.has_chat_template:
            text = (self.messages_to_prompt or plain_messages)(messages)
            return self._formatted_prompt(engine, text, documents)
        return self._rendered(engine, messages, documents)

    def _completion_prompt(
        self, engine: Any, prompt: str, formatted: bool, documents: Sequence[Any] | None
    ) -> Any:
        own_format = self.completion_to_prompt not in (None, default_completion_to_prompt)
        if not formatted and own_format:
            prompt = (self.completion_to_prompt or default_completion_to_prompt)(prompt)
        elif not formatted and engine.processor.has_chat_template:
            message = ChatMessage(role=MessageRole.USER, content=prompt)
            return self._rendered(engine, [message], documents)
        return self._formatted_prompt(engine, prompt, documents)

    def _rendered(
        self, engine: Any, messages: Sequence[ChatMessage], documents: Sequence[Any] | None
    ) -> ChatPrompt:
        find = engine.recognizer.find if engine.recognizer is not None else None
        return chat_prompt(messages, documents, engine.config.delimiter, find)

    def _formatted_prompt(
        self, engine: Any, text: str, documents: Sequence[Any] | None
    ) -> str | ChunkedPrompt:
        """A prompt around whose text no chat template may be put."""
        if documents:
            contents = [as_document(item).content for item in documents]
            return ChunkedPrompt(documents=contents, query=text, formatted=True)
        delimiter = engine.config.delimiter
        if has_delimiter(text, delimiter):
            return replace(ChunkedPrompt.from_text(text, delimiter), formatted=True)
        return text


def _stream(
    engine: Any, prompt: Any, options: CallOptions, respond: Callable[[Answer], Response]
) -> Iterator[Response]:
    accumulated = Accumulator()
    with contextlib.closing(engine.stream(prompt, options.params, **options.engine_options)) as chunks:
        for chunk in chunks:
            if (so_far := accumulated.add(chunk)) is not None:
                yield respond(so_far)


async def _astream(
    engine: Any, prompt: Any, options: CallOptions, respond: Callable[[Answer], Response]
) -> AsyncIterator[Response]:
    accumulated = Accumulator()
    async with contextlib.aclosing(
        engine.astream(prompt, options.params, **options.engine_options)
    ) as chunks:
        async for chunk in chunks:
            if (so_far := accumulated.add(chunk)) is not None:
                yield respond(so_far)


def _with_schema(llm_kwargs: dict[str, Any] | None, output_cls: Any) -> dict[str, Any]:
    return {**(llm_kwargs or {}), "json_schema": output_cls.model_json_schema()}
