"""Approximate as it is, reuse is a definite computation: another implementation of it gives the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from daric_rag import DaricConfig, DaricEngine, GenerationResult
from daric_rag.models import resolve_model
from tests.engine_support import TOLERANCE, assert_same_answer, idle_store, make_prompt, sampling
from tests.reference import ReferenceModel
from tests.tiny_models import TINY_MODELS, make_tiny_model

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def reference() -> ReferenceModel:
    return ReferenceModel(resolve_model("smollm2-135m"))


@pytest.mark.parametrize(
    ("selection", "options"),
    [("none", {}), ("epic", {"n_avg": 16}), ("daric", {"n_avg": 24}), ("daric", {"mtaf": "exp"})],
)
def test_reuse_is_what_a_plain_implementation_computes(
    engine: DaricEngine, reference: ReferenceModel, selection: str, options: dict[str, object]
) -> None:
    check_against_reference(engine, reference, selection, **options)


@pytest.mark.parametrize("family", TINY_MODELS)
def test_model_families(family: str, tmp_path: Path) -> None:
    """`all` is a plain prefill and the rest what the reference computes, in prompts that take several steps."""
    path = str(make_tiny_model(family, tmp_path / family))
    reference = ReferenceModel(path)
    config = DaricConfig(kv_pool_bytes=32 << 20, host_bytes=32 << 20)
    with DaricEngine(path, config, max_model_len=1024, max_num_batched_tokens=256) as engine:
        prompt = make_prompt(range(5))
        plain = engine.generate(prompt, sampling(), reuse=False)
        assert distance(plain, reference.full_log_probs(plain.prompt_token_ids)) <= TOLERANCE
        cold = engine.generate(prompt, sampling(), selection="all")
        warm = engine.generate(prompt, sampling(), selection="all", ratio=0.2)  # another prefix-cache world
        assert (cold.metrics.loaded_tokens, warm.metrics.generated_tokens) == (0, 0)
        for reused in (cold, warm):
            assert_same_answer(plain, reused)
        check_against_reference(engine, reference, "none")
        check_against_reference(engine, reference, "daric", n_avg=24)
        idle_store(engine)


def check_against_reference(
    engine: DaricEngine, reference: ReferenceModel, selection: str, **options: Any
) -> None:
    """Generated, with a prefix hit, loaded: three times what the reference computes, and not what a prefill does."""
    prompt = make_prompt(range(70, 75))
    results = [
        engine.generate(prompt, sampling(1), selection=selection, namespace=space, **options)
        for space in ("generated", "generated", f"{selection}{options}")
    ]
    processed = engine.processor.process(prompt, engine.config)
    expected = reference.log_probs(
        processed.token_ids, processed.bounds, results[-1].metrics.recomputed_ranges
    )
    exact = reference.full_log_probs(processed.token_ids)
    for result in results:
        assert distance(result, expected) <= TOLERANCE
        assert distance(result, exact) > 10 * TOLERANCE


def distance(result: GenerationResult, log_probs: Any) -> float:
    """Largest |Δ log-prob| over the candidates of the first token."""
    return max(abs(float(log_probs[token]) - one.logprob) for token, one in result.logprobs[0].items())
