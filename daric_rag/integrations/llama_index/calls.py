"""One call of the LlamaIndex model: its options for the engine, and the engine's results as responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LogProb,
    MessageRole,
)

from daric_rag.config import PER_CALL_OPTIONS, reject_unknown
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import GenerationResult, StreamChunk

if TYPE_CHECKING:
    from vllm import SamplingParams

SAMPLING_OPTIONS = frozenset(
    {
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop",
        "stop_token_ids",
        "seed",
        "logprobs",
        "min_tokens",
        "ignore_eos",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
    }
)
CALL_OPTIONS = SAMPLING_OPTIONS | PER_CALL_OPTIONS | {"documents", "json_schema"}


@dataclass(frozen=True)
class CallOptions:
    """What a call asks for: how to sample, how to reuse, and which documents stand before the query."""

    params: SamplingParams
    engine_options: dict[str, Any]
    documents: Sequence[Any] | None


@dataclass(frozen=True)
class Answer:
    """The text so far, what is new of it, and what both kinds of response carry beside it."""

    text: str
    delta: str | None
    raw: dict[str, Any] | None
    logprobs: list[list[LogProb]] | None


def call_options(defaults: dict[str, Any], options: dict[str, Any]) -> CallOptions:
    """Combine the model's settings with those of one call, which win unless they are None.

    Raises `ValueError` for an unknown option, with the nearest known one, and for values vLLM refuses.
    """
    reject_unknown(options, CALL_OPTIONS, "a call of DaricLLM")
    documents = options.get("documents")
    if isinstance(documents, str | bytes):
        raise ValueError("documents: a sequence of documents is expected, one text was given")
    given = {name: value for name, value in options.items() if value is not None}
    sampling = {**defaults, **{name: given[name] for name in given if name in SAMPLING_OPTIONS}}
    engine_options = {name: value for name, value in options.items() if name in PER_CALL_OPTIONS}
    return CallOptions(_sampling_params(sampling, given.get("json_schema")), engine_options, documents)


def _sampling_params(sampling: dict[str, Any], json_schema: Any) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if json_schema is not None:
        schema = json_schema if isinstance(json_schema, dict | str) else json_schema.model_json_schema()
        # Free white space lets a small model write blanks until its tokens are used up.
        sampling["structured_outputs"] = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return SamplingParams(**sampling)


# ---- results ----


def answer(result: GenerationResult) -> Answer:
    """A finished result."""
    raw = _raw(result.metrics, result.finish_reason)
    return Answer(result.text, None, raw, _logprobs(result.logprobs))


class Accumulator:
    """Joins the chunks of a stream: every response of a stream carries the text so far."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, chunk: StreamChunk) -> Answer | None:
        """The answer so far; None for a chunk that brings neither text nor the end."""
        if not chunk.text and chunk.metrics is None:
            return None
        self._text += chunk.text
        raw = None if chunk.metrics is None else _raw(chunk.metrics, chunk.finish_reason)
        return Answer(self._text, chunk.text, raw, _logprobs(chunk.logprobs))


def chat_response(answer: Answer) -> ChatResponse:
    """As the response of a chat."""
    message = ChatMessage(role=MessageRole.ASSISTANT, content=answer.text)
    return ChatResponse(message=message, delta=answer.delta, raw=answer.raw, logprobs=answer.logprobs)


def completion_response(answer: Answer) -> CompletionResponse:
    """As the response of a completion."""
    return CompletionResponse(text=answer.text, delta=answer.delta, raw=answer.raw, logprobs=answer.logprobs)


def _raw(metrics: RequestMetrics, finish_reason: str | None) -> dict[str, Any]:
    cached = metrics.engine_hit_tokens + metrics.loaded_tokens
    usage = {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return {"usage": usage, "daric": metrics.to_dict(), "finish_reason": finish_reason}


def _logprobs(tokens: Any) -> list[list[LogProb]] | None:
    """Per token the candidates, most likely first, from vLLM's {token id: Logprob}."""
    if not tokens:
        return None
    return [
        [
            LogProb(
                token=item.decoded_token or "", logprob=item.logprob, bytes=list(_utf8(item.decoded_token))
            )
            for item in sorted(candidates.values(), key=lambda item: -item.logprob)
        ]
        for candidates in tokens
    ]


def _utf8(token: str | None) -> bytes:
    return (token or "").encode("utf-8", "replace")
