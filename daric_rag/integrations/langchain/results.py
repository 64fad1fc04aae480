"""From results of the engine to what LangChain expects beside the text: usage, metadata, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import Completion, GenerationResult, StreamChunk


def usage(metrics: RequestMetrics, output_tokens: int, *, is_first: bool = True) -> UsageMetadata:
    """Token counts; `cache_read` are those whose KV was there already, loaded or in vLLM's own cache.

    Of several answers to one prompt only the first counts the prompt's tokens.
    """
    input_tokens = metrics.prompt_tokens if is_first else 0
    cached = metrics.engine_hit_tokens + metrics.loaded_tokens if is_first else 0
    return UsageMetadata(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        total_tokens=input_tokens + output_tokens,
        input_token_details=InputTokenDetails(cache_read=cached),
    )


def completion_info(result: GenerationResult, completion: Completion, model: str) -> dict[str, Any]:
    """`generation_info` of one answer; the reuse metrics are under "daric"."""
    return _info(model, completion.finish_reason, completion.stop_reason, result.metrics) | logprobs_info(
        completion.token_ids, completion.logprobs
    )


def chunk_info(chunk: StreamChunk, model: str) -> dict[str, Any]:
    """`generation_info` of a part of a stream: all but the log-probabilities come with the last one."""
    info = logprobs_info(chunk.token_ids, chunk.logprobs)
    if chunk.metrics is not None:
        info |= _info(model, chunk.finish_reason, chunk.stop_reason, chunk.metrics)
    return info


def token_usage(results: Sequence[GenerationResult]) -> dict[str, int]:
    """Sums over results, in the form of `llm_output["token_usage"]`."""
    prompt = sum(result.metrics.prompt_tokens for result in results)
    completion = sum(result.metrics.completion_tokens for result in results)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs_info(token_ids: Sequence[int], logprobs: Any) -> dict[str, Any]:
    """Log-probabilities, in the form of OpenAI's `logprobs`, or nothing if there are none."""
    if logprobs is None:
        return {}
    content = []
    for token_id, candidates in zip(token_ids, logprobs, strict=True):
        listed = sorted(candidates.items(), key=lambda item: -item[1].logprob)
        entry = _token(token_id, candidates[token_id])
        content.append({**entry, "top_logprobs": [_token(number, item) for number, item in listed]})
    return {"logprobs": {"content": content}}


def _info(model: str, finish_reason: str | None, stop_reason: Any, metrics: RequestMetrics) -> dict[str, Any]:
    return {
        "model_name": model,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "daric": metrics.to_dict(),
    }


def _token(token_id: int, item: Any) -> dict[str, Any]:
    return {"token": item.decoded_token, "token_id": token_id, "logprob": item.logprob}
