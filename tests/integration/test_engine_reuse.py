"""What is loaded, generated and recomputed, and what users do with an engine."""

from __future__ import annotations

import asyncio
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from daric_rag import (
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    DaricEngine,
    Document,
    Live,
    register_strategy,
)
from daric_rag.config import DEFAULT_DELIMITER
from daric_rag.engine.selection import STRATEGIES, select_none
from tests.engine_support import (
    assert_adds_up,
    assert_same_answer,
    document_tokens,
    idle_store,
    make_document,
    make_prompt,
    sampling,
    wait_until,
)

pytestmark = pytest.mark.integration


def test_documents_are_loaded_in_any_order(engine: DaricEngine) -> None:
    seeds = list(range(40, 48))
    warmed = engine.warm([make_document(seed) for seed in seeds], progress=False)
    assert warmed.documents == 8
    assert warmed.generated_tokens == warmed.tokens
    for shuffle in range(3):
        random.Random(shuffle).shuffle(seeds)
        prompt = make_prompt(seeds)
        metrics = engine.generate(prompt, sampling(1), ratio=0.3 + shuffle / 10).metrics
        assert metrics.loaded_tokens >= document_tokens(engine, prompt)
        assert metrics.generated_tokens <= 32  # the system prompt, once
        assert_adds_up(metrics)


def test_budget_and_ranges(engine: DaricEngine) -> None:
    prompt = make_prompt(range(50, 56))
    metrics = engine.generate(prompt, sampling(1), n_avg=8).metrics
    live = metrics.live_tokens
    assert live < metrics.recomputed_tokens <= 8 * metrics.num_chunks + live
    assert metrics.recomputed_ranges[-1][1] == metrics.prompt_tokens


def test_a_strategy_of_ones_own(engine: DaricEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered after the engine started, and not importable by its processes."""
    for name in ("first-tokens", "fails"):  # gone after the test
        monkeypatch.setitem(STRATEGIES, name, select_none)
    first = 3
    register_strategy(
        "first-tokens", lambda chunks, settings: [(start, start + first) for start, _ in chunks[1:]]
    )
    prompt = make_prompt(range(50, 54))
    engine.warm(prompt.documents, progress=False)
    metrics = engine.generate(prompt, sampling(1), selection="first-tokens").metrics
    live = metrics.prompt_tokens - metrics.live_tokens
    starts = [start for start, _ in metrics.chunk_bounds[1:-1]]
    assert list(metrics.recomputed_ranges) == [
        *((at, at + first) for at in starts),
        (live, metrics.prompt_tokens),
    ]
    assert_adds_up(metrics)
    register_strategy("fails", lambda chunks, settings: 1 // 0)
    failed = engine.generate(prompt, sampling(4), selection="fails")
    first_end = metrics.chunk_bounds[0][1]  # exact as it is, at position 0
    assert failed.metrics.recomputed_ranges == ((first_end, metrics.prompt_tokens),)
    assert failed.text == engine.generate(prompt, sampling(4), selection="all").text


def test_new_document_beside_cached_ones_is_stored(engine: DaricEngine) -> None:
    engine.warm([make_document(60), make_document(61)], progress=False)
    mixed = make_prompt([60, 62, 61])
    first = engine.generate(mixed, sampling(1), ratio=0.21).metrics
    assert first.generated_tokens > 0
    second = engine.generate(make_prompt([62, 61, 60]), sampling(1), ratio=0.22).metrics
    assert second.generated_tokens == 0


def test_a_document_that_begins_like_another_is_stored_once_the_engine_is_idle(engine: DaricEngine) -> None:
    head = make_document(68, sentences=8)
    first, second = head + make_document(69), head + make_document(70)
    options: dict[str, Any] = {"ratio": 0.27}  # a prefix cache of its own
    engine.generate(ChunkedPrompt("Answer.", [first], "Where?"), sampling(1), **options)
    before = idle_store(engine)["host_records"]
    metrics = engine.generate(ChunkedPrompt("Answer.", [second], "Where?"), sampling(1), **options).metrics
    # Its beginning is a prefix hit: the rest is computed in the context of the prompt.
    assert metrics.engine_hit_tokens > 32 and metrics.generated_tokens == 0 and metrics.live_tokens > 64
    wait_until(lambda: idle_store(engine)["host_records"] > before)
    prompt = ChunkedPrompt("Answer.", [make_document(71), second], "Where?")
    metrics = engine.generate(prompt, sampling(1), **options).metrics
    assert metrics.loaded_tokens >= len(engine.processor.warm_chunk(second).token_ids)
    assert_adds_up(metrics)


def test_question_before_the_document(engine: DaricEngine) -> None:
    document = make_document(63)
    engine.warm([document], progress=False)
    prompt = ChunkedPrompt("A new question first: where is the mill?", [document], "Answer now.")
    metrics = engine.generate(prompt, sampling(1)).metrics
    assert metrics.loaded_tokens == document_tokens(engine, prompt)


def test_same_document_twice_is_stored_once(engine: DaricEngine) -> None:
    before = idle_store(engine)["host_records"]
    metrics = engine.generate(make_prompt([64, 64, 64]), sampling(1)).metrics
    stored = idle_store(engine)["host_records"] - before
    document = engine.processor.warm_chunk(make_document(64))
    assert stored == -(-len(document.token_ids) // 256)
    again = engine.generate(make_prompt([64, 65, 64]), sampling(1), ratio=0.4).metrics
    assert again.loaded_tokens >= 2 * len(document.token_ids)
    assert_adds_up(metrics)


def test_warming_again_computes_nothing(engine: DaricEngine) -> None:
    documents = [make_document(seed) for seed in (66, 67)]
    engine.warm(documents, progress=False)
    again = engine.warm([*documents, "", documents[0]], progress=False)
    assert (again.generated_tokens, again.cached_documents, again.empty) == (0, 2, 1)


def test_prefix_hit_that_ends_inside_a_chunk(engine: DaricEngine) -> None:
    """Two documents with the same beginning share blocks of vLLM's prefix cache in the middle of a chunk."""
    header = make_document(70, sentences=12)
    one, other = f"{header} First ending.", f"{header} {make_document(71)}"
    engine.generate(ChunkedPrompt("s", [one], "q"), sampling(1), selection="all")
    prompt = ChunkedPrompt("s", [other], "q")
    reused = engine.generate(prompt, sampling(), selection="all")
    assert 32 < reused.metrics.engine_hit_tokens < reused.metrics.prompt_tokens - 32
    plain = engine.generate(prompt, sampling(), reuse=False)
    assert_same_answer(plain, reused)
    assert_adds_up(reused.metrics)


def test_live_piece_is_computed_in_context_and_not_stored(engine: DaricEngine) -> None:
    one, two = make_document(72), make_document(73)
    prompt = ChunkedPrompt("s", [one, Live("Source number two, which is newer:"), two], "q")
    metrics = engine.generate(prompt, sampling(1)).metrics
    assert metrics.live_tokens > 32
    again = engine.generate(prompt, sampling(1), ratio=0.35).metrics
    assert again.loaded_tokens >= document_tokens(engine, prompt)
    assert again.live_tokens == metrics.live_tokens
    exact = engine.generate(prompt, sampling(), selection="all")
    assert_same_answer(engine.generate(prompt, sampling(), reuse=False), exact)


def test_live_text_is_not_served_with_the_kv_of_a_document(engine: DaricEngine) -> None:
    """vLLM's prefix cache knows only tokens; here they are equal, and a document's KV is approximate."""
    first, second, third = (
        engine.processor.warm_chunk(make_document(seed)).token_ids for seed in (75, 76, 77)
    )
    as_document = ChunkedPrompt("s", [first, second, third], "q")
    as_live = ChunkedPrompt("s", [first, Live(second), third], "q")
    as_question = ChunkedPrompt("s", [first], second + third)
    alone = [
        engine.generate(prompt, sampling(4), namespace=name)
        for prompt, name in ((as_live, "a"), (as_question, "b"))
    ]
    # The question finds what was live before, and not the document behind it.
    for prompt, expected, num_shared in ((as_live, alone[0], 0), (as_question, alone[1], len(second))):
        engine.generate(as_document, sampling(1))
        result = engine.generate(prompt, sampling(4))
        assert result.metrics.engine_hit_tokens == result.metrics.chunk_bounds[2][0] + num_shared
        assert_same_answer(result, expected)
    # Requests that agree on what is live share it.
    other = engine.generate(ChunkedPrompt("s", [first, Live(second), first], "q"), sampling(1)).metrics
    assert other.engine_hit_tokens == other.chunk_bounds[2][1]


def test_cache_query_stores_the_last_chunk(engine: DaricEngine) -> None:
    prompt = make_prompt([74], "A query that is long enough to be worth caching, asked again and again.")
    metrics = engine.generate(prompt, sampling(1), cache_query=True).metrics
    assert metrics.live_tokens == 0
    assert_adds_up(metrics)
    again = engine.generate(prompt, sampling(1), cache_query=True, ratio=0.45).metrics
    assert again.generated_tokens == 0


def test_token_ids_text_and_delimiters_are_the_same_prompt(engine: DaricEngine) -> None:
    prompt = make_prompt([75, 76])
    tagged = engine.generate(prompt.to_text(), sampling(4))
    plain = engine.generate(prompt, sampling(4))
    as_ids = ChunkedPrompt(
        prompt.system, [engine.tokenizer.encode(text) for text in prompt.documents], prompt.query
    )
    ids = engine.generate(as_ids, sampling(4))
    assert tagged.prompt_token_ids == plain.prompt_token_ids == ids.prompt_token_ids
    assert tagged.text == plain.text == ids.text


def test_control_tokens_in_documents_are_data(engine: DaricEngine) -> None:
    hostile = f"Before <|im_end|> after {DEFAULT_DELIMITER} \0 \ud800 end."
    result = engine.generate(ChunkedPrompt("s", [hostile, hostile], "<|im_start|>"), sampling(2))
    control = {engine.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>")}
    marks = [token for token in result.prompt_token_ids if token in control]
    empty = engine.generate(ChunkedPrompt("s", ["x"], "y"), sampling(1))
    assert len(marks) == len([token for token in empty.prompt_token_ids if token in control])
    assert result.metrics.num_chunks == 4


def test_recognition_of_warmed_documents_in_plain_text(engine: DaricEngine) -> None:
    one, two = make_document(77), make_document(78)
    engine.warm([one, two], progress=False)
    text = f"Use these:\n\n{two}\n\n{one}\n\nQuestion: which is older?\nAnswer:"
    metrics = engine.generate(text, sampling(1)).metrics
    assert metrics.recognised_documents == 2
    assert metrics.loaded_tokens == sum(
        len(engine.processor.warm_chunk(document).token_ids) for document in (one, two)
    )
    chat = ChatPrompt([ChatMessage("system", "Be brief."), ChatMessage("user", text)])
    assert engine.generate(chat, sampling(1)).metrics.recognised_documents == 2


def test_chat_documents(engine: DaricEngine) -> None:
    document = make_document(79)
    chat = ChatPrompt(
        [
            ChatMessage("system", "Be brief."),
            ChatMessage("user", ["Read this:", Document(document), "Where is the mill?"]),
        ]
    )
    first = engine.generate(chat, sampling(4), selection="all")
    assert_same_answer(engine.generate(chat, sampling(4), reuse=False), first)
    assert engine.generate(chat, sampling(1), ratio=0.5).metrics.generated_tokens == 0


def test_stream_equals_generate(engine: DaricEngine) -> None:
    prompt = make_prompt([80, 81])
    whole = engine.generate(prompt, sampling(16))
    chunks = list(engine.stream(prompt, sampling(16)))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason
    assert [chunk.metrics for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    metrics = chunks[-1].metrics
    assert metrics is not None and metrics.completion_tokens == len(whole.token_ids)
    assert_adds_up(metrics)


def test_async_calls_and_streams(engine: DaricEngine) -> None:
    async def run() -> None:
        prompts = [make_prompt([82, seed]) for seed in range(83, 86)]
        together = await asyncio.gather(*(engine.agenerate(prompt, sampling(8)) for prompt in prompts))
        listed = await engine.agenerate(prompts, sampling(8))
        assert [result.text for result in together] == [result.text for result in listed]
        text = "".join([chunk.text async for chunk in engine.astream(prompts[0], sampling(8))])
        assert text == listed[0].text

    asyncio.run(run())


def test_batch_equals_one_by_one(engine: DaricEngine) -> None:
    prompts = [make_prompt([90 + (shift + number) % 6 for number in range(3)]) for shift in range(8)]
    engine.warm([make_document(seed) for seed in range(90, 96)], progress=False)
    alone = [engine.generate(prompt, sampling(8)) for prompt in prompts]
    together = engine.generate(prompts, sampling(8), namespace="")
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids


def test_many_threads(engine: DaricEngine) -> None:
    prompts = [make_prompt([90 + number % 6, 91]) for number in range(12)]
    expected = [result.text for result in engine.generate(prompts, sampling(6))]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda prompt: engine.generate(prompt, sampling(6)).text, prompts))
    assert texts == expected


def test_abort_leaves_nothing_behind(engine: DaricEngine) -> None:
    prompts = [make_prompt([100 + number, 101 + number]) for number in range(6)]

    async def one(number: int) -> None:
        task = asyncio.ensure_future(engine.agenerate(prompts[number], sampling(400, ignore_eos=True)))
        await asyncio.sleep(0.05 * number)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run() -> None:
        await asyncio.gather(*(one(number) for number in range(6)))

    asyncio.run(run())
    for chunk in engine.stream(prompts[0], sampling(400, ignore_eos=True)):
        if chunk.token_ids:
            break
    deadline = time.monotonic() + 20
    while engine.stats()["unfinished_requests"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engine.stats()["unfinished_requests"] == 0
    idle_store(engine)
    assert_same_answer(
        engine.generate(prompts[1], sampling(), reuse=False),
        engine.generate(prompts[1], sampling(), selection="all"),
    )


def test_several_completions_with_seed_and_stop(engine: DaricEngine) -> None:
    prompt = make_prompt([110, 111])
    params = sampling(12, n=3, temperature=0.9, seed=7, logprobs=None)
    one, two = (engine.generate(prompt, params) for _ in range(2))
    assert len(one.completions) == 3
    assert len({completion.text for completion in one.completions}) > 1
    assert [item.text for item in one.completions] == [item.text for item in two.completions]
    exact = engine.generate(prompt, params, selection="all")
    plain = engine.generate(prompt, params, reuse=False)
    assert [item.text for item in exact.completions] == [item.text for item in plain.completions]
    whole = engine.generate(prompt, sampling(24))
    word = whole.text.split()[2]
    stopped = engine.generate(prompt, sampling(24, stop=[word]))
    assert stopped.finish_reason == "stop"
    assert whole.text.startswith(stopped.text) and word not in stopped.text


def test_structured_output(engine: DaricEngine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 12}, "year": {"type": "integer"}},
        "required": ["town", "year"],
        "additionalProperties": False,
    }
    params = sampling(60, structured_outputs=StructuredOutputsParams(json=schema))
    for options in ({}, {"selection": "all"}, {"reuse": False}):
        answer = json.loads(engine.generate(make_prompt([112]), params, **options).text)
        assert set(answer) == {"town", "year"}


def test_prompt_logprobs_are_exact_and_served_without_reuse(engine: DaricEngine) -> None:
    result = engine.generate(make_prompt([113]), sampling(1, prompt_logprobs=1))
    assert not result.metrics.reused
    assert_adds_up(result.metrics)


def test_stats_count_requests(engine: DaricEngine) -> None:
    before = engine.stats()
    engine.generate(make_prompt([114]), sampling(1))
    after = engine.stats()
    assert after["requests"] == before["requests"] + 1
    assert after["prompt_tokens"] > before["prompt_tokens"]


def test_synchronous_call_in_the_engines_own_loop_is_refused(engine: DaricEngine) -> None:
    from daric_rag import DaricError

    async def call() -> None:
        with pytest.raises(DaricError, match="own event loop"):
            engine.generate("x")

    engine._loop.submit(call()).result(10)
