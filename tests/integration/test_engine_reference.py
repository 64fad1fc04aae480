"""Approximate as it is, reuse is a definite computation: another implementation of it gives the same numbers."""

from __future__ import annotations

import pytest

from daric_rag import DaricEngine
from daric_rag.models import resolve_model
from tests.engine_support import TOLERANCE, make_prompt, sampling
from tests.reference import ReferenceLlama

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def reference() -> ReferenceLlama:
    return ReferenceLlama(resolve_model("smollm2-135m"))


@pytest.mark.parametrize(
    ("selection", "options"),
    [("none", {}), ("epic", {"n_avg": 16}), ("daric", {"n_avg": 24}), ("daric", {"mtaf": "exp"})],
)
def test_reuse_is_what_a_plain_implementation_computes(
    engine: DaricEngine, reference: ReferenceLlama, selection: str, options: dict[str, object]
) -> None:
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
        candidates = result.logprobs[0]
        assert max(abs(expected[token] - one.logprob) for token, one in candidates.items()) <= TOLERANCE
        assert max(abs(exact[token] - one.logprob) for token, one in candidates.items()) > 10 * TOLERANCE
