"""Recomputing everything through sub-requests is a plain prefill, whatever vLLM does beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from daric_rag import DaricConfig, DaricEngine
from tests.engine_support import (
    assert_adds_up,
    assert_same_answer,
    idle_store,
    largest_difference,
    make_document,
    make_prompt,
    sampling,
    schedule_asynchronously,
)
from tests.tiny_models import make_tiny_adapter

pytestmark = pytest.mark.integration

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # name: (DaricConfig options, vLLM engine arguments)
    "no-prefix-cache-large-blocks": (
        {"block_size": 64},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 500},
    ),
    "chunked-prefill-lora": ({}, {"max_num_batched_tokens": 96, "max_num_seqs": 8, **LORA}),
    # The CPU platform turns async scheduling off; the fixture turns it on again. It is the default on GPUs.
    # A pool of 80 blocks, for eight requests of some 30: vLLM preempts. The worker has a process of its own.
    "async-scheduling-tiny-pool": (
        {"kv_pool_bytes": 2_621_440, "host_bytes": 1 << 20},
        {"max_num_batched_tokens": 256, "max_num_seqs": 8, "distributed_executor_backend": "mp"},
    ),
}


@pytest.fixture(scope="module", params=SETTINGS)
def variant(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[DaricEngine]:
    """Engines on a small random model, one setting after the other."""
    config, engine_args = SETTINGS[request.param]
    options = {"kv_pool_bytes": 64 << 20, "host_bytes": 64 << 20, **config}
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("async-scheduling"):
            schedule_asynchronously(patch)
        shared = DaricEngine(tiny_model, DaricConfig(**options), max_model_len=2048, **engine_args)
    with shared:
        yield shared


@pytest.mark.parametrize("num_chunks", [2, 5, 12])
def test_all_equals_plain_prefill(engine: DaricEngine, num_chunks: int) -> None:
    order = list(range(num_chunks - 2)) or [0]
    random.Random(num_chunks).shuffle(order)
    prompt = make_prompt(order)
    plain = engine.generate(prompt, sampling(), reuse=False)
    cold = engine.generate(prompt, sampling(), selection="all")
    warm = engine.generate(prompt, sampling(), selection="all", ratio=0.2)  # another prefix-cache world
    assert cold.prompt_token_ids == plain.prompt_token_ids
    for reused in (cold, warm):
        assert_same_answer(plain, reused)
        assert_adds_up(reused.metrics)
    assert warm.metrics.loaded_tokens > 0
    assert warm.metrics.generated_tokens == 0


def test_reuse_is_approximate_so_that_exactness_means_something(engine: DaricEngine) -> None:
    prompt = make_prompt(range(20, 26))
    plain = engine.generate(prompt, sampling(1), reuse=False)
    everything = engine.generate(prompt, sampling(1), selection="all")
    nothing = engine.generate(prompt, sampling(1), selection="none")
    assert largest_difference(plain, everything) * 20 < largest_difference(plain, nothing)


def test_first_document_alone_is_exact(engine: DaricEngine) -> None:
    """What stands at position 0 was computed at position 0: no rotation, no recomputation, no error."""
    prompt = make_prompt([])
    with_system = engine.generate(prompt, sampling(4), selection="none")
    plain = engine.generate(prompt, sampling(4), reuse=False)
    assert_same_answer(plain, with_system)


def test_variants_equal_plain_prefill(variant: DaricEngine) -> None:
    for seed in range(3):
        order = [(seed * 3 + number) % 8 for number in range(5)]
        prompt = make_prompt(order)
        plain = variant.generate(prompt, sampling(), reuse=False)
        reused = variant.generate(prompt, sampling(), selection="all")
        assert_same_answer(plain, reused)
        assert_adds_up(reused.metrics)
    idle_store(variant)


def test_variants_are_exact_under_load(variant: DaricEngine) -> None:
    """Eight reuse requests at once, mixed with plain ones, decoding while others prefill; pools overflow."""
    prompts = [make_prompt([(seed + shift) % 7 for shift in range(4)]) for seed in range(8)]
    params = [sampling(24 + 8 * number, ignore_eos=True) for number in range(8)]
    alone = [variant.generate(prompt, one, reuse=False) for prompt, one in zip(prompts, params, strict=True)]
    together = variant.generate(prompts, params, selection="all")
    for plain, reused in zip(alone, together, strict=True):
        assert_same_answer(plain, reused)
        assert_adds_up(reused.metrics)
    idle_store(variant)


def test_variants_reuse_the_same_way(variant: DaricEngine) -> None:
    """One prompt gives one answer: cold, loaded, in one step or in several, with a prefix hit or without."""
    prompt = make_prompt([11, 12, 13, 14])
    first = variant.generate(prompt, sampling(), n_avg=16)
    variant.generate(make_prompt([14, 11]), sampling(1), n_avg=16)
    second = variant.generate(prompt, sampling(), n_avg=16)
    third = variant.generate(prompt, sampling(), n_avg=16, namespace="elsewhere")
    for other in (second, third):
        assert_same_answer(first, other)


@pytest.mark.parametrize("variant", ["chunked-prefill-lora"], indirect=True)
def test_adapters_share_nothing_and_are_exact(variant: DaricEngine, tmp_path: Path) -> None:
    """Every sub-request computes with its request's adapter, whose KV no other adapter loads."""
    adapters = [
        LoRARequest(f"adapter-{number}", number, str(make_tiny_adapter(tmp_path / str(number), number)))
        for number in (1, 2)
    ]
    prompt = make_prompt([16, 17, 18])
    base = variant.generate(prompt, sampling(), reuse=False)
    variant.generate(prompt, sampling(1), selection="all")
    plain = [variant.generate(prompt, sampling(), reuse=False, lora_request=one) for one in adapters]
    assert largest_difference(base, plain[0]) > 0.1
    assert largest_difference(*plain) > 0.1
    for adapter, expected in zip(adapters, plain, strict=True):
        cold = variant.generate(prompt, sampling(), selection="all", lora_request=adapter)
        warm = variant.generate(prompt, sampling(), selection="all", ratio=0.2, lora_request=adapter)
        assert (cold.metrics.loaded_tokens, warm.metrics.generated_tokens) == (0, 0)
        assert_same_answer(expected, cold)
        assert_same_answer(expected, warm)
    documents = [make_document(19)]
    assert variant.warm(documents, progress=False, lora_request=adapters[0]).generated_tokens > 0
    assert variant.warm(documents, progress=False, lora_request=adapters[0]).generated_tokens == 0
    assert variant.warm(documents, progress=False, lora_request=adapters[1]).generated_tokens > 0
    together = variant.generate(
        [prompt] * 2, sampling(), selection="all", ratio=0.3, lora_request=adapters[1]
    )
    for result in together:
        assert_same_answer(plain[1], result)


def test_reuse_never_reaches_plain_requests(engine: DaricEngine) -> None:
    check_reuse_never_reaches_plain_requests(engine)


def test_variants_keep_reuse_from_plain_requests(variant: DaricEngine) -> None:
    check_reuse_never_reaches_plain_requests(variant)


def check_reuse_never_reaches_plain_requests(engine: DaricEngine) -> None:
    """A plain request after an approximate one with the same tokens computes all but the system prompt."""
    prompt = make_prompt([30, 31, 32])
    rough = engine.generate(prompt, sampling(), selection="none")
    plain = engine.generate(prompt, sampling(), reuse=False)
    assert rough.prompt_token_ids == plain.prompt_token_ids
    assert plain.metrics.engine_hit_tokens <= 64
    exact = engine.generate(prompt, sampling(), selection="all")
    assert_same_answer(exact, plain)
    assert largest_difference(rough, plain) > 1e-3
