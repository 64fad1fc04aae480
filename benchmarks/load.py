"""What callers do to each other: streams beside prefills, documents that several ask for, warming, a slow disk.

Every figure is a ratio of measurements of one run on one machine. Passes, steps and their length are counted in the
worker's process by `tests.worker_probe`, which also makes reads as slow as a disk of a given speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.datasets import Question
from benchmarks.reuse import one_token
from benchmarks.streams import gaps, streams
from daric_rag import ChunkedPrompt, DaricConfig, DaricEngine, GenerationResult, Live
from daric_rag.engine.keys import Tier, root_key, segment_chain
from daric_rag.engine.scheduling.index.base import KVIndex
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.plan import ChunkLayout
from daric_rag.engine.scheduling.scheduler_side import SchedulerSide
from daric_rag.engine.selection import SelectionSettings
from tests.redis_server import RedisServer
from tests.tiny_models import make_tiny_model
from tests.worker_probe import EXTENSION, ask_worker

SHARED_DOCUMENT_TOKENS = 600
STALL_TOLERANCE = 1.5
SLOW_DISK_TOLERANCE = 1 / 0.95
NUM_PARTS = 6
_DISK_PASSAGES = 5


@dataclass(frozen=True)
class LoadOptions:
    """How much is measured; the defaults take some ten minutes on two cores."""

    arrivals: int = 3
    decodes: int = 16
    crowd: int = 60
    warmed_documents: int = 2000
    disk_prompts: int = 3
    disk_rates: tuple[float, ...] = (20e6, 5e6)

    @property
    def num_questions(self) -> int:
        """Questions that the parts need, of the dataset."""
        return max(self.arrivals + 1, self.disk_prompts * len(self.disk_rates))


def run(
    model: str, config: DaricConfig, questions: Sequence[Question], options: LoadOptions, redis: str | None
) -> Iterator[dict[str, Any]]:
    """Measure part after part; yields all figures so far after each."""
    questions = [_distinct(number, question) for number, question in enumerate(questions)]
    result: dict[str, Any] = {"look_up_s": look_up(redis)}
    yield result
    with _engine(model, config) as engine:
        _warm_up(engine)
        result["inter_token"] = inter_token(engine, questions[: options.arrivals], options.decodes)
        yield result
        result["passes"] = passes(engine, questions[-1], options.crowd)
        yield result
        result["shared_document"] = shared_document(engine, questions[0])
        yield result
    with tempfile.TemporaryDirectory() as path:
        tiny = str(make_tiny_model("Llama", Path(path)))
        with _engine(tiny, DaricConfig(host_bytes=1 << 30, kv_pool_bytes=64 << 20)) as engine:
            _warm_up(engine)
            result["warming"] = warming(engine, questions, options.warmed_documents)
            yield result
    result["slow_disk"] = slow_disk(model, config, questions, options)
    yield result


def _distinct(number: int, question: Question) -> Question:
    """The question over documents that are in no other: what is new must not have been stored by another."""
    documents = tuple(f"Passage for question {number}. {document}" for document in question.documents)
    return Question(f"{question.question} (question {number})", documents)


@contextmanager
def _engine(model: str, config: DaricConfig) -> Iterator[DaricEngine]:
    with DaricEngine(model, config, max_model_len=8192, **EXTENSION) as engine:
        ask_worker(engine, "probe_start")
        yield engine


def _warm_up(engine: DaricEngine) -> None:
    """The first requests of a process are slow: threads, allocator, page faults."""
    for options in ({"reuse": False}, {}):
        prompt = ChunkedPrompt("Be brief.", ["A town by a river. " * 60], "Where is it?")
        engine.generate(prompt, one_token(), namespace="warm-up", **options)


# ---- running streams ----


def inter_token(engine: DaricEngine, questions: Sequence[Question], decodes: int) -> dict[str, Any]:
    """p99 of the seconds between tokens of running decodes while prompts with documents arrive one a second.

    From the first arrival to the first token of the last: plain vLLM, then reuse with nothing stored, then with all
    documents stored. The cap of 1.0 caps nothing but keeps the cold requests out of the warm ones' prefix cache.
    """
    methods: dict[str, dict[str, Any]] = {
        "plain": {"reuse": False},
        "cold": {"namespace": "arrivals", "max_fraction": 1.0},
        "warm": {"namespace": "arrivals"},
    }
    result: dict[str, Any] = {"arrivals": len(questions), "decodes": decodes}
    for name, options in methods.items():
        seconds_between, seconds = asyncio.run(_arrivals(engine, questions, decodes, options))
        result[f"{name}_p99_s"] = float(np.percentile(seconds_between, 99))
        result[f"{name}_median_s"] = statistics.median(seconds_between)
        result[f"{name}_seconds"] = seconds
    for name in ("cold", "warm"):
        result[f"{name}_over_plain"] = result[f"{name}_p99_s"] / result["plain_p99_s"]
    return result


async def _arrivals(
    engine: DaricEngine, questions: Sequence[Question], decodes: int, options: dict[str, Any]
) -> tuple[list[float], float]:
    async def arrive(number: int, question: Question) -> None:
        await asyncio.sleep(number)
        await engine.agenerate(question.prompt(), one_token(), **options)

    async with streams(engine, decodes) as moments:
        started = time.perf_counter()
        await asyncio.gather(*(arrive(number, question) for number, question in enumerate(questions)))
        ended = time.perf_counter()
        # The gap during which the last prefill ended is over once every stream has its next token.
        while any(times[-1] < ended for times in moments):
            await asyncio.sleep(0.05)
    return gaps(moments, started, ended), ended - started


def passes(engine: DaricEngine, question: Question, crowd: int) -> dict[str, Any]:
    """Forward passes of the steps in which one prompt prefills while a crowd decodes, documents stored or not."""

    async def ask(options: dict[str, Any]) -> tuple[list[int], int]:
        async with streams(engine, crowd):
            await asyncio.to_thread(ask_worker, engine, "probe_start")
            answer = await engine.agenerate(question.prompt(), one_token(), **options)
            counts = await asyncio.to_thread(ask_worker, engine, "probe_counts")
        return counts["reuse_passes"], len(answer.metrics.recomputed_ranges)

    cold, _ = asyncio.run(ask({"namespace": "crowd", "max_fraction": 1.0}))
    warm, ranges = asyncio.run(ask({"namespace": "crowd"}))
    return {"decodes": crowd, "ranges": ranges, "cold_passes": cold, "warm_passes": warm}


# ---- documents that many ask for ----


def shared_document(engine: DaricEngine, question: Question, callers: int = 8) -> dict[str, float]:
    """How often a new document is computed that several requests ask for at once, at one or at many positions."""
    tokens = engine.tokenizer.encode(" ".join(question.documents))[:SHARED_DOCUMENT_TOKENS]
    known = " ".join(question.documents)[-900:]
    computed = {}
    for name in ("same_position", "other_positions"):
        engine.generate(ChunkedPrompt("Be brief.", [known], "What is this?"), one_token(), namespace=name)
        prompts = []
        for caller in range(callers):
            before = [] if name == "same_position" else [Live(f"Caller {caller} reads this first. " * 8)]
            prompts.append(ChunkedPrompt("Be brief.", [*before, tokens], f"What is question {caller}?"))
        company = replace(question.prompt(), documents=question.documents[:2])
        answers = asyncio.run(_in_one_step(engine, company, prompts, name))
        processed = engine.processor.process(prompts[0], engine.config)
        document = sum(end - start for start, end in processed.documents)
        computed[name] = sum(answer.metrics.generated_tokens for answer in answers) / document
    return computed


async def _in_one_step(
    engine: DaricEngine, company: ChunkedPrompt, prompts: Sequence[ChunkedPrompt], namespace: str
) -> list[GenerationResult]:
    """Answers to prompts that all arrive while the engine computes another one, and so are scheduled together."""
    apart = {"reuse": False, "namespace": f"company of {namespace}"}
    first = asyncio.ensure_future(engine.agenerate(company, one_token(), **apart))
    await asyncio.sleep(0.5)
    answers = await asyncio.gather(
        *(engine.agenerate(prompt, one_token(), namespace=namespace) for prompt in prompts)
    )
    await first
    return list(answers)


# ---- look-up ----


def look_up(redis_url: str | None, chunks: int = 12, chunk_tokens: int = 512, rounds: int = 2000) -> Any:
    """Median seconds of a waiting request's look-up after its first, by index; nothing has changed in between."""
    result = {"memory": _look_up(MemoryIndex(), chunks, chunk_tokens, rounds)}
    with contextlib.ExitStack() as stack:
        if redis_url is None and shutil.which("redis-server"):
            server = RedisServer()
            stack.enter_context(server)
            redis_url = server.url
        if redis_url is not None:
            from daric_rag.engine.scheduling.index.redis import RedisIndex

            result["redis"] = _look_up(RedisIndex(redis_url), chunks, chunk_tokens, rounds)
    return result


def _look_up(index: KVIndex, chunks: int, chunk_tokens: int, rounds: int) -> float:
    """The first half of the chunks is stored, the others are not."""
    root, block_size = root_key({"benchmark": "load"}), 32
    bounds = tuple((number * chunk_tokens, (number + 1) * chunk_tokens) for number in range(chunks))
    live = (False,) * (chunks - 1) + (True,)
    layout = ChunkLayout(bounds, live, SelectionSettings())
    token_ids = list(range(chunks * chunk_tokens))
    for start, end in bounds[: chunks // 2]:
        index.insert([one.key for one in segment_chain(root, token_ids[start:end])], Tier.HOST)
    index.flush()
    side = SchedulerSide(index, block_size)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        side.num_external_tokens("waiting", layout, token_ids, 0, root)
        times.append(time.perf_counter() - started)
    index.close()
    return statistics.median(times[1:])


# ---- warming ----


def warming(engine: DaricEngine, questions: Sequence[Question], count: int) -> dict[str, float]:
    """Longest wait of a running stream for its next token while documents are warmed, and the longest step."""
    texts = [document[:1200] for question in questions for document in question.documents]
    documents = [f"Record {number}. {texts[number % len(texts)]}" for number in range(count)]

    async def warm() -> tuple[list[float], float]:
        async with streams(engine, 1) as moments:
            await asyncio.to_thread(ask_worker, engine, "probe_start")
            started = time.perf_counter()
            await engine.awarm(documents, progress=False)
            ended = time.perf_counter()
            while moments[0][-1] < ended:
                await asyncio.sleep(0.05)
        return gaps(moments, started, ended), ended - started

    waits, seconds = asyncio.run(warm())
    longest_step = ask_worker(engine, "probe_counts")["longest_step_s"]
    return {
        "documents": count,
        "seconds": seconds,
        "longest_stall_s": max(waits),
        "longest_step_s": longest_step,
        "stall_over_step": max(waits) / longest_step,
    }


# ---- a slow disk ----


def slow_disk(
    model: str, config: DaricConfig, questions: Sequence[Question], options: LoadOptions
) -> dict[str, Any]:
    """TTFT with all documents on a disk of a given speed ÷ with nothing stored, prompt by prompt.

    The engine that reads is not the one that wrote: its host memory holds none of the documents.
    """
    wanted = options.disk_prompts * len(options.disk_rates)
    shorter = [replace(one, documents=one.documents[:_DISK_PASSAGES]) for one in questions[:wanted]]
    if len(shorter) < wanted:
        raise ValueError(f"the slow disk needs {wanted} questions, the dataset has {len(shorter)}")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="daric-bench-") as path:
        with_disk = DaricConfig(**{**config.model_dump(), "disk_path": path})
        with _engine(model, with_disk) as engine:
            for one in shorter:
                engine.warm([one.prompt().system, *one.documents], progress=False)
        with _engine(model, with_disk) as engine:
            _warm_up(engine)
            for number, rate in enumerate(options.disk_rates):
                ask_worker(engine, "probe_throttle_reads", rate)
                mine = shorter[number * options.disk_prompts :][: options.disk_prompts]
                ratios = [_warm_over_cold(engine, question) for question in mine]
                result[f"{rate / 1e6:.0f}_mb_per_s"] = ratios
            if not ask_worker(engine, "probe_counts")["throttled_bytes"]:
                raise RuntimeError("no read went through os.preadv: nothing was slowed down")
    return result


def _warm_over_cold(engine: DaricEngine, question: Question) -> dict[str, float]:
    prompt = question.prompt()
    cold = engine.generate(prompt, one_token(), namespace=question.question, max_fraction=1.0).metrics
    warm = engine.generate(prompt, one_token()).metrics
    return {
        "cold_s": cold.ttft_s,
        "warm_s": warm.ttft_s,
        "warm_over_cold": warm.ttft_s / cold.ttft_s,
        "loaded_tokens": warm.loaded_tokens,
        "generated_tokens": warm.generated_tokens,
    }


# ---- the table ----


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target, of the parts that were measured."""
    table = []
    for index, seconds in result["look_up_s"].items():
        table.append(
            (f"look-up of a waiting request after its first, {index}", f"{seconds * 1e6:.1f} µs", "≤ 20")
        )
    if one := result.get("inter_token"):
        shown = " / ".join(f"{one[f'{name}_p99_s']:.2f}" for name in ("plain", "cold", "warm"))
        table.append((f"p99 between tokens of {one['decodes']} decodes, plain / cold / warm, s", shown, ""))
        for name in ("cold", "warm"):
            table.append((f"the same, {name} ÷ plain", f"{one[f'{name}_over_plain']:.2f}", "≤ 1.0"))
    if one := result.get("passes"):
        for name in ("cold", "warm"):
            figure = f"most passes in a step, {one['decodes']} decodes, {one['ranges']} ranges, {name}"
            table.append((figure, str(max(one[f"{name}_passes"])), "≤ 2"))
    for name, times in result.get("shared_document", {}).items():
        figure = f"times a new document of 8 requests is computed, {name.replace('_', ' ')}"
        table.append((figure, f"{times:.2f}", "1"))
    if one := result.get("warming"):
        seconds = f"{one['longest_stall_s']:.2f} / {one['longest_step_s']:.2f}"
        table.append((f"longest stall / longest step, {one['documents']} documents warmed, s", seconds, ""))
        table.append(
            ("longest stall ÷ longest step", f"{one['stall_over_step']:.2f}", f"≤ {STALL_TOLERANCE}")
        )
    for rate, prompts in result.get("slow_disk", {}).items():
        shown = " / ".join(f"{one['warm_over_cold']:.2f}" for one in prompts)
        figure = f"TTFT on disk ÷ nothing stored, {rate.replace('_mb_per_s', ' MB/s')}, prompt by prompt"
        table.append((figure, shown, f"≤ {SLOW_DISK_TOLERANCE:.2f}"))
    return table
