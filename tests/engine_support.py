"""Prompts and comparisons that the engine tests share."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from daric_rag import ChunkedPrompt, DaricEngine, GenerationResult
from daric_rag.engine.metrics import RequestMetrics

_PLACES = [
    "Aldam",
    "Brook",
    "Corva",
    "Dunmere",
    "Elsin",
    "Farrow",
    "Gilden",
    "Harth",
    "Ister",
    "Jorund",
    "Kelm",
    "Lorne",
    "Morvan",
    "Nesby",
    "Orlin",
]
_THINGS = [
    "lighthouse",
    "bakery",
    "library",
    "railway",
    "mill",
    "observatory",
    "harbour",
    "theatre",
    "brewery",
    "museum",
]

# Float32 sums in another order; two prefills of the same tokens differ by less than this.
TOLERANCE = 1e-3


def make_document(seed: int, sentences: int = 5) -> str:
    """A short text about a made-up town; another seed gives another text."""
    draw = random.Random(seed)
    place = f"{draw.choice(_PLACES)}{seed}"
    lines = [f"{place} is a town of {draw.randrange(900, 90000)} people."]
    for _ in range(sentences):
        thing, year = draw.choice(_THINGS), draw.randrange(1500, 2000)
        lines.append(f"Its {thing} was built in {year} by {draw.choice(_PLACES)} {draw.choice(_PLACES)}.")
    return " ".join(lines)


def make_prompt(seeds: Sequence[int], query: str = "Which town has the oldest building?") -> ChunkedPrompt:
    """System prompt, one document per seed, query: len(seeds) + 2 chunks."""
    return ChunkedPrompt("Answer from the documents.", [make_document(seed) for seed in seeds], query)


def sampling(max_tokens: int = 12, **options: Any) -> Any:
    """Greedy parameters with the five best log-probabilities."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "logprobs": 5, **options})


def largest_difference(one: GenerationResult, other: GenerationResult) -> float:
    """Largest |Δ log-prob| over the tokens and candidates that both results have; infinite if they share none."""
    differences = [
        abs(mine[token].logprob - theirs[token].logprob)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True)
        for token in mine.keys() & theirs.keys()
    ]
    return max(differences, default=math.inf)


def assert_same_answer(one: GenerationResult, other: GenerationResult) -> None:
    """The same greedy tokens with the same log-probabilities."""
    assert one.token_ids == other.token_ids
    assert largest_difference(one, other) <= TOLERANCE


def assert_adds_up(metrics: RequestMetrics) -> None:
    """Every prompt token has one source."""
    sources = (
        metrics.engine_hit_tokens + metrics.loaded_tokens + metrics.generated_tokens + metrics.live_tokens
    )
    assert metrics.prompt_tokens == sources
    assert metrics.recomputed_tokens == sum(end - start for start, end in metrics.recomputed_ranges)


def document_tokens(engine: DaricEngine, prompt: ChunkedPrompt) -> int:
    """Tokens of the prompt's document chunks, padding included."""
    processed = engine.processor.process(prompt, engine.config)
    return sum(end - start for start, end in processed.documents)


def idle_store(engine: DaricEngine) -> dict[str, Any]:
    """The store's counters; nothing may be pinned or reserved when no request runs."""
    store: dict[str, Any] = engine.stats()["store"]
    assert store["pins"] == 0
    assert store["reservations"] == 0
    return store


def schedule_asynchronously(patch: pytest.MonkeyPatch) -> None:
    """Make engines that start now schedule asynchronously, the default on GPUs; the CPU platform turns it off."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    create = AsyncEngineArgs.create_engine_config

    def with_async_scheduling(self: Any, *args: Any, **kwargs: Any) -> Any:
        vllm_config = create(self, *args, **kwargs)
        vllm_config.scheduler_config.async_scheduling = True
        return vllm_config

    patch.setattr(AsyncEngineArgs, "create_engine_config", with_async_scheduling)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Return once the condition holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)
