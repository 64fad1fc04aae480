"""Time to first token and first-token KL with and without reuse, on the same prompts in one run.

Methods, in turn for every prompt, one prompt at a time:

- plain      vLLM without reuse (its prefix cache holds the system prompt at most)
- cold       reuse with nothing cached: chunks are generated, stored and partly recomputed
- warm       reuse with all documents cached, in the prompt's order
- shuffled   the same documents in random order
- floor      vLLM without reuse whose prefix cache covers all but the last k tokens, k = tokens that `warm` recomputed

Answers are one token long; TTFT is the wall clock from the call to the first token, tokenisation included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.datasets import Question
from daric_rag import DaricEngine, GenerationResult

KL_STRATEGIES = ("daric", "epic", "none")


@dataclass
class Samples:
    """Measurements of one run: seconds by method, KL by strategy, parts of the warm requests."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    kl: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, list[float]] = field(default_factory=dict)
    loaded_shares: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    recomputed_tokens: list[int] = field(default_factory=list)

    def add(self, group: dict[str, list[float]], name: str, value: float) -> None:
        group.setdefault(name, []).append(value)


def run(
    engine: DaricEngine, questions: Sequence[Question], bar: Any, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Measure every method on every question and return the medians and ratios.

    `keep` is given the result so far after every question: a run of an hour may be interrupted.
    """
    samples = Samples()
    # The first prefill of a process is slow: threads, allocator, page faults.
    engine.generate(questions[-1].prompt(99), one_token(), reuse=False, namespace="warm-up")
    for number, question in enumerate(questions):
        _measure(engine, question, number, samples)
        keep(_summary(samples))
        bar.update()
    return _summary(samples)


def _measure(engine: DaricEngine, question: Question, number: int, samples: Samples) -> None:
    prompt = question.prompt()
    plain = engine.generate(prompt, one_token(), reuse=False)
    # Questions may share passages: a namespace each, so that nothing is cached. The cap of 1.0 caps nothing but
    # keeps the cold request out of the prefix-cache world of the warm one.
    space = f"question-{number}"
    cold = engine.generate(prompt, one_token(), namespace=space, max_fraction=1.0)
    warm = engine.generate(prompt, one_token(), namespace=space)
    shuffled_prompt = question.prompt(number)
    shuffled = engine.generate(shuffled_prompt, one_token(), namespace=space)
    floor = _floor(engine, plain, warm.metrics.recomputed_tokens)
    for name, result in {
        "plain": plain,
        "cold": cold,
        "warm": warm,
        "shuffled": shuffled,
        "floor": floor,
    }.items():
        samples.add(samples.ttft, name, result.metrics.ttft_s)
    for part in ("lookup_s", "load_s", "generate_s", "recompute_s"):
        samples.add(samples.parts, f"warm {part}", getattr(warm.metrics, part))
        samples.add(samples.parts, f"cold {part}", getattr(cold.metrics, part))
    documents = engine.processor.process(shuffled_prompt, engine.config).documents
    document_tokens = sum(end - start for start, end in documents)
    # Where the random order begins like the first one, vLLM's own prefix cache has the tokens already.
    hit = max(0, shuffled.metrics.engine_hit_tokens - documents[0][0])
    samples.loaded_shares.append(min(1.0, (shuffled.metrics.loaded_tokens + hit) / document_tokens))
    samples.prompt_tokens.append(plain.metrics.prompt_tokens)
    samples.recomputed_tokens.append(warm.metrics.recomputed_tokens)
    _measure_kl(engine, prompt, space, samples)


def _floor(engine: DaricEngine, plain: GenerationResult, recomputed: int) -> GenerationResult:
    """The same prompt with its last k tokens changed: vLLM's prefix cache, filled by `plain`, covers the rest.

    The hit ends on a block boundary; it is rounded so that the floor computes at most k tokens.
    """
    block = engine.config.block_size
    tokens = list(plain.prompt_token_ids)
    hit = -(-(len(tokens) - recomputed) // block) * block
    tokens[hit] = tokens[hit] + 1 if tokens[hit] < 1000 else tokens[hit] - 1
    floor = engine.generate(tokens, one_token(), reuse=False)
    assert floor.metrics.engine_hit_tokens == hit
    return floor


def _measure_kl(engine: DaricEngine, prompt: Any, space: str, samples: Samples) -> None:
    params = one_token(logprobs=-1)
    reference = engine.generate(prompt, params, reuse=False).logprobs[0]
    for strategy in KL_STRATEGIES:
        other = engine.generate(prompt, params, selection=strategy, namespace=space).logprobs[0]
        samples.add(samples.kl, strategy, kl_divergence(reference, other))


def kl_divergence(reference: dict[int, Any], other: dict[int, Any]) -> float:
    """KL(reference ‖ other) in nats of two first-token distributions over the whole vocabulary."""
    return sum(
        math.exp(entry.logprob) * (entry.logprob - other[token].logprob)
        for token, entry in reference.items()
        if entry.logprob > -50
    )


def one_token(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0.0, **options)


def _summary(samples: Samples) -> dict[str, Any]:
    ttft = {name: statistics.median(values) for name, values in samples.ttft.items()}
    kl = {name: statistics.median(values) for name, values in samples.kl.items()}
    kl_mean = {name: statistics.fmean(values) for name, values in samples.kl.items()}

    def ratio(above: str, below: str) -> float:
        pairs = zip(samples.ttft[above], samples.ttft[below], strict=True)
        return statistics.median(one / other for one, other in pairs)

    return {
        "prompts": len(samples.prompt_tokens),
        "prompt_tokens_median": statistics.median(samples.prompt_tokens),
        "recomputed_tokens_median": statistics.median(samples.recomputed_tokens),
        "ttft_median_s": ttft,
        "plain_over_warm": ratio("plain", "warm"),
        "plain_over_shuffled": ratio("plain", "shuffled"),
        "warm_over_floor": ratio("warm", "floor"),
        "cold_over_plain": ratio("cold", "plain"),
        "document_tokens_loaded_min": min(samples.loaded_shares),
        "kl_median": kl,
        "kl_mean": kl_mean,
        "kl_daric_over_none": kl_mean["daric"] / kl_mean["none"],
        "kl_epic_over_none": kl_mean["epic"] / kl_mean["none"],
        "parts_median_s": {name: statistics.median(values) for name, values in samples.parts.items()},
    }


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    ttft, kl = result["ttft_median_s"], result["kl_median"]
    parts = result["parts_median_s"]
    return [
        ("prompts; median tokens; recomputed", _join(result, "prompts", "prompt_tokens_median"), ""),
        ("TTFT plain / cold / warm / floor, s", " / ".join(f"{ttft[n]:.2f}" for n in _SHOWN), ""),
        ("TTFT plain ÷ warm", f"{result['plain_over_warm']:.1f}", "≥ 10"),
        ("TTFT plain ÷ shuffled", f"{result['plain_over_shuffled']:.1f}", ""),
        ("TTFT warm ÷ floor", f"{result['warm_over_floor']:.2f}", "≤ 1.25"),
        ("TTFT cold ÷ plain", f"{result['cold_over_plain']:.2f}", "≤ 0.9"),
        ("document tokens loaded, shuffled", f"{result['document_tokens_loaded_min']:.0%}", "100 %"),
        ("first-token KL daric / epic / none", " / ".join(f"{kl[n]:.4f}" for n in KL_STRATEGIES), ""),
        ("mean KL daric ÷ none", f"{result['kl_daric_over_none']:.2f}", "report"),
        ("mean KL epic ÷ none", f"{result['kl_epic_over_none']:.2f}", "report"),
        *((f"{name.replace('_s', '')}, s", f"{value:.4f}", "") for name, value in parts.items()),
    ]


_SHOWN = ("plain", "cold", "warm", "floor")


def _join(result: dict[str, Any], *names: str) -> str:
    return "; ".join(f"{result[name]:.0f}" for name in (*names, "recomputed_tokens_median"))
