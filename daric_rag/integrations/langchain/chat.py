"""`ChatDaric`: a LangChain chat model over a `DaricEngine`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field

from daric_rag.config import one_of
from daric_rag.engine.result import GenerationResult, StreamChunk
from daric_rag.integrations.langchain.messages import artifact_texts, to_chat_prompt
from daric_rag.integrations.langchain.model import Call, DaricModel
from daric_rag.integrations.langchain.results import chunk_info, completion_info, token_usage, usage
from daric_rag.integrations.langchain.tools import (
    ParsedAnswer,
    Tool,
    ToolCallGate,
    call_schema,
    chosen_tools,
    openai_tools,
    parse_answer,
)
from daric_rag.known_documents import register_documents
from daric_rag.prompt import ChatPrompt

# Options of a call that only a chat model has; LangChain's own way to ask for streaming is one of them.
_CHAT_OPTIONS = frozenset({"tools", "tool_choice", "response_format", "stream"})

Method = Literal["json_schema", "function_calling", "json_mode"]


@dataclass(frozen=True)
class _ChatCall:
    """A call of a chat model: the engine's part, the tools in the prompt, and whether one has to be called."""

    call: Call
    tools: list[Tool]
    forced: bool

    def prompt(self, messages: Sequence[BaseMessage]) -> ChatPrompt:
        """The engine's prompt for messages."""
        register_documents(artifact_texts(messages))
        return to_chat_prompt(messages, self.call.form, self.call.documents, self.tools)


class ChatDaric(DaricModel, BaseChatModel):
    """A chat model that reuses the KV of documents at any position; messages use the model's chat template.

    Documents come as `documents=[…]` of a call, as content blocks, between delimiters, or are recognised.
    Options of a call: also the sampling fields and the options of reuse (`reuse`, `selection`, `n_avg`, `ratio`,
    `mtaf`, `max_fraction`, `cache_query`, `namespace`). Tools and structured output constrain the answer with
    vLLM's structured outputs. The metrics of a request are under "daric" in `response_metadata`.

        chat = ChatDaric(model="smollm2-135m", max_tokens=64)
        chat.invoke("Where is Paris?", documents=["Paris is in France."])

    Raises `ValueError` for unknown or bad options, naming the nearest one, and for messages with anything but text.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    streaming: bool = Field(False, description="Stream internally even for `invoke`, for callbacks.")

    @property
    def _llm_type(self) -> str:
        return "daric-chat"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return self.identity()

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Give the model tools.

        `tool_choice`: "auto" (default), "none", "any" or "required", or a tool's name; a forced call always
        matches the tool's schema (so `strict` changes nothing) and is one call. Raises `ValueError` for a tool
        that is not given.
        """
        converted = openai_tools(tools)
        chosen_tools(converted, tool_choice)
        choice = {} if tool_choice is None else {"tool_choice": tool_choice}
        return self.bind(tools=converted, **choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers as objects of a schema (Pydantic class, TypedDict or JSON Schema).

        `method`: "json_schema" constrains the answer to the schema, "function_calling" to a call of a tool with
        it, "json_mode" to any JSON. With `include_raw`: a dict of raw, parsed and parsing_error.
        """
        one_of("method", method, ("json_schema", "function_calling", "json_mode"))
        if kwargs:
            raise ValueError(f"unknown option {next(iter(kwargs))!r} for with_structured_output")
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw)
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: BaseOutputParser[Any]
        parser = PydanticOutputParser(pydantic_object=cast(Any, schema)) if is_class else JsonOutputParser()
        response_format: dict[str, Any] = {"type": "json_object"}
        if method == "json_schema":
            response_format = {"type": method, method: {"schema": convert_to_json_schema(schema)}}
        model = self.bind(
            response_format=response_format,
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        )
        return _with_raw(model, parser) if include_raw else model | parser

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=self.stop if stop is None else stop, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chat = self._start(stop, kwargs)
        call = chat.call
        result = call.engine.generate(chat.prompt(messages), call.params, **call.overrides)
        return _chat_result(result, chat)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        chat = await asyncio.to_thread(self._start, stop, kwargs)
        call = chat.call
        result = await call.engine.agenerate(chat.prompt(messages), call.params, **call.overrides)
        return _chat_result(result, chat)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        chat = self._start(stop, kwargs, streaming=True)
        call, gate = chat.call, ToolCallGate(chat.tools, forced=chat.forced)
        stream = call.engine.stream(chat.prompt(messages), call.params, **call.overrides)
        # The base class calls the callbacks of every chunk.
        with contextlib.closing(stream):  # type: ignore[type-var]
            for part in stream:
                if chunk := _chat_chunk(part, gate, call.model):
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        chat = await asyncio.to_thread(self._start, stop, kwargs, streaming=True)
        call, gate = chat.call, ToolCallGate(chat.tools, forced=chat.forced)
        stream = call.engine.astream(chat.prompt(messages), call.params, **call.overrides)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for part in stream:
                if chunk := _chat_chunk(part, gate, call.model):
                    yield chunk

    def _start(
        self, stop: list[str] | None, options: Mapping[str, Any], *, streaming: bool = False
    ) -> _ChatCall:
        engine_options = {name: value for name, value in options.items() if name not in _CHAT_OPTIONS}
        choice = options.get("tool_choice")
        tools = [] if choice == "none" else openai_tools(options.get("tools") or [])
        chosen = chosen_tools(tools, choice)
        constraint = _constraint(chosen, options.get("response_format"))
        call = self.start_call(stop, engine_options, streaming=streaming, constraint=constraint)
        return _ChatCall(call, tools, chosen is not None)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        outputs = [output for output in llm_outputs if output]  # None: the answer came from a cache
        if not outputs:
            return {}
        usages = [output["token_usage"] for output in outputs]
        total = {name: sum(one[name] for one in usages) for name in usages[0]}
        return {"token_usage": total, "model_name": outputs[0]["model_name"]}


def _constraint(chosen: Sequence[Tool] | None, response_format: Any) -> dict[str, Any] | None:
    """Arguments of vLLM's `StructuredOutputsParams`, or None if the answer is free."""
    if chosen is not None:
        if response_format is not None:
            raise ValueError("response_format cannot be given together with a tool_choice that forces a call")
        return {"json": call_schema(chosen)}
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(response_format.get("json_schema", {}).get("schema"), dict):
        return {"json": response_format["json_schema"]["schema"]}
    if kind == "text":
        return None
    raise ValueError(
        f"response_format={response_format!r}: allowed are {{'type': 'text'}}, {{'type': 'json_object'}} and "
        "{'type': 'json_schema', 'json_schema': {'schema': …}}"
    )


def _chat_result(result: GenerationResult, chat: _ChatCall) -> ChatResult:
    generations = []
    for completion in result.completions:
        parsed = parse_answer(completion.text, chat.tools)
        message = AIMessage(
            content=parsed.text,
            tool_calls=list(parsed.calls),
            invalid_tool_calls=list(parsed.invalid),
            usage_metadata=usage(result.metrics, len(completion.token_ids), is_first=completion.index == 0),
        )
        info = completion_info(result, completion, chat.call.model)
        generations.append(ChatGeneration(message=message, generation_info=info))
    return ChatResult(
        generations=generations,
        llm_output={"token_usage": token_usage([result]), "model_name": chat.call.model},
    )


def _chat_chunk(part: StreamChunk, gate: ToolCallGate, model: str) -> ChatGenerationChunk | None:
    """The next chunk, or None if there is nothing to show yet."""
    text = gate.feed(part.text)
    info = chunk_info(part, model)
    if part.metrics is None:
        if not text and not info:
            return None
        return ChatGenerationChunk(message=AIMessageChunk(content=text), generation_info=info or None)
    rest = gate.finish()
    message = AIMessageChunk(
        content=text + rest.text,
        tool_call_chunks=_tool_call_chunks(rest),
        usage_metadata=usage(part.metrics, part.metrics.completion_tokens),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info=info)


def _tool_call_chunks(answer: ParsedAnswer) -> list[ToolCallChunk]:
    texts = [
        (call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"]) for call in answer.calls
    ]
    texts += [(call["name"] or "", call["args"] or "", call["id"]) for call in answer.invalid]
    return [
        tool_call_chunk(name=name, args=args, id=call_id, index=index)
        for index, (name, args, call_id) in enumerate(texts)
    ]


def _with_raw(model: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=model) | parsed.with_fallbacks([failed], exception_key="parsing_error")
