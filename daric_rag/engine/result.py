"""What a call returns: text, and what happened to every token of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY


@dataclass(frozen=True)
class Completion:
    """One of the `n` texts of a result."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: Any = None
    cumulative_logprob: float | None = None

    @classmethod
    def of(cls, item: Any) -> Completion:
        """Of a `vllm.outputs.CompletionOutput`."""
        return cls(
            index=item.index,
            text=item.text,
            token_ids=tuple(item.token_ids),
            finish_reason=item.finish_reason,
            stop_reason=item.stop_reason,
            logprobs=item.logprobs,
            cumulative_logprob=item.cumulative_logprob,
        )


@dataclass(frozen=True)
class GenerationResult:
    """The result of one prompt; `completions` has more than one entry for n > 1.

    `logprobs`: if asked for, per token a dict from token id to `vllm.logprobs.Logprob`.
    """

    request_id: str
    completions: tuple[Completion, ...]
    metrics: RequestMetrics
    prompt_token_ids: list[int] = field(repr=False, default_factory=list)

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The first completion's token ids."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> Any:
        """The first completion's log-probabilities, or None."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the first completion ended: stop, length or abort."""
        return self.completions[0].finish_reason


@dataclass(frozen=True)
class StreamChunk:
    """New text of a stream; the last chunk of the whole request has `metrics`."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Any = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class WarmResult:
    """What `warm` did, in documents, tokens and seconds; empty documents count only in `empty`."""

    documents: int
    tokens: int
    generated_tokens: int
    cached_documents: int
    empty: int
    seconds: float


def build_metrics(
    processed: ProcessedPrompt, params: dict[str, Any] | None, num_cached: int, ttft_s: float, completion: int
) -> RequestMetrics:
    """Combine what client, scheduler and worker know of a request.

    Without reuse all tokens but vLLM's own prefix hit are live: computed in full context.
    """
    report: dict[str, Any] = dict((params or {}).get(EXTRA_ARGS_KEY) or {})
    report.pop("unstored", None)
    prompt_tokens = len(processed.token_ids)
    reused = bool(report)
    if not reused:
        live = prompt_tokens - num_cached
        report = {
            "loaded_tokens": 0,
            "generated_tokens": 0,
            "engine_hit_tokens": num_cached,
            "live_tokens": live,
            "recomputed_tokens": live,
            "recomputed_ranges": [(num_cached, prompt_tokens)],
        }
    report["recomputed_ranges"] = tuple(tuple(item) for item in report["recomputed_ranges"])
    return RequestMetrics(
        prompt_tokens=prompt_tokens,
        padding_tokens=processed.padding_tokens,
        ttft_s=ttft_s,
        completion_tokens=completion,
        num_chunks=max(1, len(processed.bounds)),
        chunk_bounds=processed.bounds,
        document_ranges=processed.documents,
        dropped_documents=processed.dropped_documents,
        recognised_documents=processed.recognised_documents,
        reused=reused,
        **report,
    )
