"""Whoever else asks at the same moment, every caller gets the answer that it gets alone.

Prompts are longer than a step's budget, begin alike and part inside a document, so that requests are stopped in
the middle of chunks whose blocks other requests share.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from daric_rag import ChunkedPrompt, DaricConfig, DaricEngine, GenerationResult
from tests.engine_support import (
    assert_adds_up,
    assert_same_answer,
    idle_store,
    make_document,
    sampling,
    schedule_asynchronously,
    wait_until,
)
from tests.worker_probe import EXTENSION, ask_worker

pytestmark = pytest.mark.integration

SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    # name: (blocks in vLLM's pool, vLLM engine arguments)
    "2048": (2000, {"max_num_batched_tokens": 2048}),
    # Three prompts' worth of blocks for eight callers, all admitted: vLLM preempts in the middle of prefills.
    "3000-small-pool": (540, {"max_num_batched_tokens": 3000, "scheduler_reserve_full_isl": False}),
    "4096-async-scheduling": (2000, {"max_num_batched_tokens": 4096}),
}
BLOCK_BYTES = 32 * 1024
"""Of 32 tokens of the tiny model: 2 layers of K and V, 2 heads, 32 numbers of 4 bytes."""

NUM_DOCUMENTS = 10
QUERY = (
    "Read all of the passages above with care before you answer. Name the town that has the oldest building, say "
    "what that building is, when it was built and by whom, and then say in one more sentence what you make of "
    "question number {}, which is the only thing in which this request differs from those of all other callers."
)
# How many documents of the common beginning a caller keeps. All prompts have the same number of chunks and end in
# long queries, so the tokens recomputed in what they share are the same: vLLM's prefix cache changes no answer.
KEPT = (10, 10, 7, 5, 5, 2, 0, 7)


def make_text(number: int) -> str:
    return make_document(number, sentences=26)


def caller_prompt(caller: int, *, parts_inside_a_document: bool = False) -> ChunkedPrompt:
    """What a caller asks: the common beginning, and after it documents in an order of its own.

    With `parts_inside_a_document` the first document after it is the common one up to its middle.
    """
    kept = KEPT[caller]
    documents = [make_text(number) for number in range(kept)]
    others = random.Random(caller).sample(range(kept + 1, 20), NUM_DOCUMENTS - kept)
    documents += [make_text(number) for number in others]
    if parts_inside_a_document and others:
        common = make_text(kept)
        documents[kept] = f"{common[: len(common) // 2]} {make_document(50 + caller, sentences=12)}"
    return ChunkedPrompt("Answer from the documents.", documents, QUERY.format(caller))


def caller_params(caller: int) -> Any:
    return sampling(4 + 4 * caller, ignore_eos=True)


@dataclass
class Served:
    """An engine and the answers that callers get alone, each in a namespace where nobody else is."""

    engine: DaricEngine
    name: str
    alone: dict[tuple[int, str], GenerationResult] = field(default_factory=dict)

    @property
    def is_small(self) -> bool:
        """Whether vLLM preempts and evicts."""
        return self.name.endswith("small-pool")

    async def ask(self, caller: int, selection: str, namespace: str) -> GenerationResult:
        """One caller's request.

        Where a prefix hit ends inside a document, the rest of that document is computed in full context: exact
        with `all`, else better than alone. So prompts part inside documents with `all` only, and callers share
        nothing where vLLM evicts parts of documents.
        """
        if self.is_small and selection != "all":
            namespace = f"{namespace}-{caller}"
        prompt = caller_prompt(caller, parts_inside_a_document=selection == "all")
        return await self.engine.agenerate(
            prompt, caller_params(caller), selection=selection, n_avg=16, namespace=namespace
        )

    def assert_as_alone(self, caller: int, selection: str, result: GenerationResult) -> None:
        if (caller, selection) not in self.alone:
            self.alone[caller, selection] = asyncio.run(self.ask(caller, selection, f"alone-{caller}"))
        assert_adds_up(result.metrics)
        if selection == "all" or not self._resumed_inside_a_document(result):
            assert_same_answer(self.alone[caller, selection], result)

    def _resumed_inside_a_document(self, result: GenerationResult) -> bool:
        hit = result.metrics.engine_hit_tokens
        inside = any(start < hit < end for start, end in result.metrics.chunk_bounds[:-1])
        assert not inside or self.is_small
        return inside

    def ask_together(self, callers: Sequence[int], selection: str, namespace: str) -> None:
        """All at the same moment; every answer must be that of the caller alone."""

        async def run() -> list[GenerationResult]:
            return list(await asyncio.gather(*(self.ask(caller, selection, namespace) for caller in callers)))

        for caller, together in zip(callers, asyncio.run(run()), strict=True):
            self.assert_as_alone(caller, selection, together)

    def assert_idle(self) -> None:
        """Nothing is pinned, unfinished or remembered once no request runs."""
        # What is stored only once the engine is idle is a request too, and may begin between two questions.
        wait_until(self._is_idle)

    def _is_idle(self) -> bool:
        if self.engine.stats()["unfinished_requests"]:
            return False
        # Aborted requests leave the scheduler with the next step.
        self.engine.generate("step", sampling(2))
        idle_store(self.engine)
        return bool(self.counts()["tracked_requests"] == 0)

    def counts(self) -> dict[str, Any]:
        values: dict[str, Any] = ask_worker(self.engine, "probe_counts")
        return values


@pytest.fixture(scope="module", params=SETTINGS)
def served(request: pytest.FixtureRequest, tiny_model: str) -> Iterator[Served]:
    num_blocks, arguments = SETTINGS[request.param]
    config = DaricConfig(kv_pool_bytes=num_blocks * BLOCK_BYTES, host_bytes=512 << 20)
    with pytest.MonkeyPatch.context() as patch:
        if request.param.endswith("async-scheduling"):
            schedule_asynchronously(patch)
        engine = DaricEngine(tiny_model, config, max_model_len=8192, **arguments, **EXTENSION)
    with engine:
        ask_worker(engine, "probe_start")
        yield Served(engine, request.param)


@pytest.mark.parametrize("selection", ["daric", "all", "none"])
def test_eight_callers_over_new_documents(served: Served, selection: str) -> None:
    served.ask_together(range(8), selection, f"new-{selection}")
    served.assert_idle()
    if served.is_small:
        assert served.counts()["preemptions"] > 0


def test_recomputing_all_is_plain_vllm(served: Served) -> None:
    """What the answers are held against is right itself."""
    for caller in (0, 6):
        prompt = caller_prompt(caller, parts_inside_a_document=True)
        plain = served.engine.generate(prompt, caller_params(caller), reuse=False)
        served.assert_as_alone(caller, "all", plain)


def test_eight_callers_where_some_documents_are_warm(served: Served) -> None:
    some = [make_text(number) for number in range(0, 20, 2)]
    served.engine.warm(some, progress=False, namespace="some-warm")
    served.ask_together(range(8), "epic", "some-warm")
    # Now all of them are, in a prefix-cache world of which parts are there.
    served.ask_together((6, 4, 2, 0, 1, 3, 5, 7), "daric", "some-warm")
    served.assert_idle()


def test_four_completions_are_those_of_four_requests(served: Served) -> None:
    """vLLM makes a request of each completion; they arrive together, over the same blocks."""

    def params(number: int, count: int) -> Any:
        return sampling(12, n=count, temperature=0.8, seed=5 + number, ignore_eos=True)

    options: dict[str, Any] = {"n_avg": 16}
    expected = [
        served.engine.generate(caller_prompt(2), params(number, 1), namespace=f"single-{number}", **options)
        for number in range(4)
    ]

    async def run() -> list[GenerationResult]:
        requests = [
            served.engine.agenerate(caller_prompt(caller), params(0, 4), namespace="four", **options)
            for caller in (2, 3)
        ]
        return list(await asyncio.gather(*requests))

    together, _ = asyncio.run(run())
    assert [one.token_ids for one in together.completions] == [one.token_ids for one in expected]
    served.assert_idle()


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_leave_nothing_behind(served: Served, seed: int) -> None:
    """Half of the callers go away; the others, and who comes after on the same blocks, get right answers."""
    draw = random.Random(seed)
    namespace = f"aborts-{seed}"
    leaving = set(draw.sample(range(8), 4))

    async def one(caller: int) -> GenerationResult | None:
        request = asyncio.ensure_future(served.ask(caller, "daric", namespace))
        if caller in leaving:
            await asyncio.sleep(draw.uniform(0, 1.5))
            request.cancel()
        (result,) = await asyncio.gather(request, return_exceptions=True)
        if isinstance(result, asyncio.CancelledError):
            return None
        if isinstance(result, BaseException):
            raise result
        return result

    async def run() -> list[GenerationResult | None]:
        return list(await asyncio.gather(*(one(caller) for caller in range(8))))

    for caller, result in enumerate(asyncio.run(run())):
        assert result is not None or caller in leaving
        if result is not None:
            served.assert_as_alone(caller, "daric", result)
    served.assert_idle()
    served.ask_together(sorted(leaving), "daric", namespace)


ARRIVALS = st.lists(
    # caller, seconds after the one before, seconds until it goes away (None: it stays)
    st.tuples(
        st.integers(0, 7),
        st.sampled_from((0.0, 0.0, 0.02, 0.1, 0.3)),
        st.one_of(st.none(), st.none(), st.floats(0, 0.8)),
    ),
    min_size=2,
    max_size=8,
)


# A dead engine cannot be asked again for a smaller example.
@settings(max_examples=5, database=None, phases=[Phase.generate])
@given(arrivals=ARRIVALS, selection=st.sampled_from(("daric", "all", "epic")), warm=st.integers(0, 20))
def test_any_arrivals_give_the_answers_of_each_alone(
    served: Served, arrivals: list[tuple[int, float, float | None]], selection: str, warm: int
) -> None:
    namespace = f"arrivals-{time.monotonic_ns()}"
    served.engine.warm([make_text(number) for number in range(warm)], progress=False, namespace=namespace)

    async def run() -> list[Any]:
        requests = []
        for caller, pause, leaves_after in arrivals:
            await asyncio.sleep(pause)
            request = asyncio.ensure_future(served.ask(caller, selection, namespace))
            if leaves_after is not None:
                asyncio.get_running_loop().call_later(leaves_after, request.cancel)
            requests.append(request)
        return list(await asyncio.gather(*requests, return_exceptions=True))

    for (caller, _, leaves_after), result in zip(arrivals, asyncio.run(run()), strict=True):
        if isinstance(result, asyncio.CancelledError) and leaves_after is not None:
            continue
        if isinstance(result, BaseException):
            raise result
        served.assert_as_alone(caller, selection, result)
    served.assert_idle()
