"""What the cache costs: look-ups by index size, disk against host memory, saving, and narrower storage."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.datasets import Question
from benchmarks.reuse import kl_divergence, one_token
from daric_rag import DaricConfig, DaricEngine
from daric_rag.engine.keys import Tier, root_key, segment_chain
from daric_rag.engine.scheduling.index.base import KVIndex
from daric_rag.engine.scheduling.index.memory import MemoryIndex

_CHUNKS, _CHUNK_TOKENS = 12, 512
_SIZES = (24, 1_000, 100_000)


# ---- look-up ----


def run_lookup(redis_url: str | None, rounds: int = 300) -> dict[str, Any]:
    """Median seconds to look up a prompt of 12 chunks and 24 segments, by stored segments and index.

    `hash` is the time to name the segments of the 6,144 tokens, which every look-up needs first.
    """
    chains = _stored_prompt()
    result: dict[str, Any] = {"hash_s": _median(_stored_prompt, rounds // 3)}
    for name, open_index in _indexes(redis_url):
        index = open_index()
        stored = 0
        for keys in chains:
            index.insert(keys, Tier.HOST)
            stored += len(keys)
        for size in _SIZES:
            missing = max(0, size - stored)
            for batch in _filler(missing):
                index.insert(batch, Tier.HOST)
            stored += missing
            index.flush()
            result[f"{name}_{size}_s"] = _median(lambda index=index: index.lookup(chains), rounds)
        index.close()
    return result


def _indexes(redis_url: str | None) -> Iterator[tuple[str, Callable[[], KVIndex]]]:
    yield "memory", MemoryIndex
    if redis_url is not None:
        from daric_rag.engine.scheduling.index.redis import RedisIndex

        yield "redis", lambda: RedisIndex(redis_url)


def _stored_prompt() -> list[list[bytes]]:
    root = root_key({"benchmark": True})
    return [[segment.key for segment in segment_chain(root, tokens)] for tokens in _TOKENS]


_TOKENS = [list(range(number, number + _CHUNK_TOKENS)) for number in range(_CHUNKS)]


def _filler(count: int) -> Iterator[list[bytes]]:
    draw = np.random.default_rng(count)
    while count > 0:
        batch = min(count, 2000)
        yield [draw.bytes(32) for _ in range(batch)]
        count -= batch


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def lookup_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    rows = [("naming 24 segments of 6,144 tokens", f"{result['hash_s'] * 1e3:.2f} ms", "")]
    for name, target in (("memory", "≤ 1 ms"), ("redis", "≤ 3 ms")):
        values = [result.get(f"{name}_{size}_s") for size in _SIZES]
        if values[0] is None:
            continue
        shown = " / ".join(f"{value * 1e3:.3f}" for value in values if value is not None)
        rows.append((f"{name} look-up at 24 / 1,000 / 100,000 segments", f"{shown} ms", target))
        total = [
            value + (result["hash_s"] if name == "memory" else 0) for value in values if value is not None
        ]
        rows.append(
            (
                f"{name} growth, naming included" if name == "memory" else f"{name} growth",
                f"{max(total) / min(total):.2f}×",
                "≤ 1.5×",
            )
        )
    return rows


# ---- disk ----


def run_disk(model: str, questions: Sequence[Question], bar: Any) -> dict[str, Any]:
    """TTFT with everything in host memory, on disk with a warm page cache, and on disk with a cold one.

    Also the TTFT of cold prompts with the disk tier on and off, which is what saving costs.
    """
    host, warm_disk, cold_disk, saving, plain_cold = [], [], [], [], []
    with _directory() as path:
        with DaricEngine(
            model, DaricConfig(disk_path=str(path), host_bytes=3 << 30), max_model_len=8192
        ) as engine:
            _warm_up(engine, questions)
            for number, question in enumerate(questions):
                saving.append(_ttft(engine, question, namespace=f"new-{number}"))
                engine.warm([*question.documents, question.prompt().system], progress=False)
                host.append(_ttft(engine, question))
                bar.update()
        for drop, times in ((False, warm_disk), (True, cold_disk)):
            with DaricEngine(
                model, DaricConfig(disk_path=str(path), host_bytes=3 << 30), max_model_len=8192
            ) as engine:
                _warm_up(engine, questions)
                for question in questions:
                    if drop:
                        _drop_pages(path)
                    times.append(_ttft(engine, question))
                    bar.update()
    with DaricEngine(model, DaricConfig(host_bytes=3 << 30), max_model_len=8192) as engine:
        _warm_up(engine, questions)
        for number, question in enumerate(questions):
            plain_cold.append(_ttft(engine, question, namespace=f"new-{number}"))
            bar.update()
    return {
        "prompts": len(questions),
        "host_s": statistics.median(host),
        "disk_warm_s": statistics.median(warm_disk),
        "disk_cold_s": statistics.median(cold_disk),
        "disk_warm_over_host": _ratio(warm_disk, host),
        "disk_cold_over_host": _ratio(cold_disk, host),
        "cold_prompt_with_disk_s": statistics.median(saving),
        "cold_prompt_without_disk_s": statistics.median(plain_cold),
        "saving_ratio": _ratio(saving, plain_cold),
    }


def disk_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    times = " / ".join(f"{result[name]:.2f}" for name in ("host_s", "disk_warm_s", "disk_cold_s"))
    return [
        ("TTFT host / disk, warm pages / disk, cold pages, s", times, ""),
        ("disk with warm pages ÷ host", f"{result['disk_warm_over_host']:.2f}", "≤ 2.5"),
        ("disk with cold pages ÷ host", f"{result['disk_cold_over_host']:.2f}", "report"),
        ("TTFT of a cold prompt, disk tier on ÷ off", f"{result['saving_ratio']:.2f}", "≤ 1.05"),
    ]


# ---- storage dtype ----


def run_storage(model: str, questions: Sequence[Question], bar: Any) -> dict[str, Any]:
    """Bytes per token, load seconds and first-token KL from full prefill of each storage dtype."""
    result: dict[str, Any] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        config = DaricConfig(storage_dtype=dtype, host_bytes=3 << 30)  # type: ignore[arg-type]
        loads, divergences, num_bytes, num_tokens = [], [], 0, 0
        with DaricEngine(model, config, max_model_len=8192, max_logprobs=-1) as engine:
            _warm_up(engine, questions)
            for question in questions:
                prompt = question.prompt()
                before = engine.stats()["store"]["host_bytes"]
                warmed = engine.warm([*question.documents, prompt.system], progress=False)
                num_bytes += engine.stats()["store"]["host_bytes"] - before
                num_tokens += warmed.generated_tokens
                params = one_token(logprobs=-1)
                loaded = engine.generate(prompt, params)
                loads.append(loaded.metrics.load_s)
                reference = engine.generate(prompt, params, reuse=False)
                divergences.append(kl_divergence(reference.logprobs[0], loaded.logprobs[0]))
                bar.update()
        result[dtype] = {
            "bytes_per_token": num_bytes / max(1, num_tokens),
            "load_s": statistics.median(loads),
            "kl_mean": statistics.fmean(divergences),
        }
    return result


def storage_rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    return [
        (
            f"{dtype}: bytes a token, load, mean KL",
            f"{item['bytes_per_token']:.0f}  {item['load_s'] * 1e3:.0f} ms  {item['kl_mean']:.4f}",
            "report",
        )
        for dtype, item in result.items()
    ]


def _ttft(engine: DaricEngine, question: Question, **options: Any) -> float:
    return engine.generate(question.prompt(), one_token(), **options).metrics.ttft_s


def _warm_up(engine: DaricEngine, questions: Sequence[Question]) -> None:
    """A process's first prefill is slow: threads, allocator, page faults."""
    prompt = replace(questions[0].prompt(), documents=questions[0].documents[:2])
    engine.generate(prompt, one_token(), namespace="warm-up", reuse=False)


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(above, below, strict=True))


@contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="daric-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _drop_pages(path: Path) -> None:
    """Push the records' pages out of the page cache; they are written already."""
    for file in path.rglob("*.kv"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
