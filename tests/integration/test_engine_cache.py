"""A warmed cache outlives its engine, is shared, and survives what happens to its files and to Redis."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from daric_rag import ChunkedPrompt, DaricConfig, DaricEngine, GenerationResult
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.errors import CacheUnavailableError, DaricError
from tests.engine_support import (
    assert_adds_up,
    assert_same_answer,
    document_tokens,
    idle_store,
    largest_difference,
    make_document,
    make_prompt,
    sampling,
    wait_until,
)
from tests.redis_server import RedisServer

pytestmark = pytest.mark.integration

SEEDS = tuple(range(12))


def open_engine(model: str, **options: object) -> DaricEngine:
    values = {"kv_pool_bytes": 16 << 20, "host_bytes": 32 << 20, **options}
    return DaricEngine(model, DaricConfig(**values), max_model_len=4096)  # type: ignore[arg-type]


def fresh_metrics(engine: DaricEngine, seeds: tuple[int, ...], world: list[int]) -> RequestMetrics:
    """Ask over the documents in a prefix-cache world of its own, so that only our cache can hit."""
    world[0] += 1
    return engine.generate(make_prompt(seeds), sampling(1), ratio=0.001 * world[0]).metrics


@pytest.fixture(scope="module")
def world() -> list[int]:
    return [0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def sharing(tiny_model: str, directory: Path, redis_server: RedisServer) -> Iterator[DaricEngine]:
    """An engine with a disk tier and a Redis index, after another one warmed both and ended."""
    options = {"disk_path": str(directory), "index": redis_server.url}
    with open_engine(tiny_model, **options) as first:
        first.warm([make_document(seed) for seed in SEEDS], progress=False)
        vllm = weakref.ref(first._llm)
    # Else its destructor runs at the interpreter's exit, with half of vLLM gone, and writes a traceback.
    assert vllm() is None
    with open_engine(tiny_model, **options) as second:
        yield second


def test_documents_hit_after_a_restart(sharing: DaricEngine, world: list[int]) -> None:
    again = sharing.warm([make_document(seed) for seed in SEEDS], progress=False)
    assert again.generated_tokens == 0
    metrics = fresh_metrics(sharing, (5, 3, 8), world)
    assert metrics.loaded_tokens >= document_tokens(sharing, make_prompt((5, 3, 8)))
    assert_adds_up(metrics)
    assert idle_store(sharing)["disk_hits"] > 0


def test_loaded_from_disk_is_what_was_generated(sharing: DaricEngine) -> None:
    prompt = make_prompt((9, 2, 7))
    loaded = sharing.generate(prompt, sampling(), n_avg=16)
    assert loaded.metrics.loaded_tokens > 0
    generated = sharing.generate(prompt, sampling(), n_avg=16, namespace="not yet cached")
    assert generated.metrics.loaded_tokens == 0
    assert_same_answer(loaded, generated)


@pytest.fixture(scope="module")
def beside(sharing: DaricEngine, tiny_model: str, directory: Path) -> Iterator[DaricEngine]:
    """A second engine on the directory, without Redis, whose host tier holds a few documents only."""
    with open_engine(tiny_model, disk_path=str(directory), host_bytes=1 << 20) as second:
        yield second


def test_a_second_engine_beside_the_first_hits(
    sharing: DaricEngine, beside: DaricEngine, world: list[int]
) -> None:
    metrics = fresh_metrics(beside, (1, 4), world)
    assert metrics.loaded_tokens >= document_tokens(beside, make_prompt((1, 4)))
    # What the first engine adds while the second runs is found on disk, without Redis.
    sharing.warm([make_document(100)], progress=False)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if fresh_metrics(beside, (100,), world).generated_tokens == 0:
            break
    assert fresh_metrics(beside, (100, 1), world).generated_tokens == 0
    _ask_both_at_once(sharing, beside)


def _ask_both_at_once(one: DaricEngine, other: DaricEngine) -> None:
    """200 requests to two engines on one directory, storing and loading; answers are those of one engine."""
    prompts = [make_prompt((seed, (seed * 3 + 1) % 20, (seed * 7 + 2) % 20)) for seed in range(20)]
    params = sampling(3)
    expected = [one.generate(prompt, params, namespace="reference").token_ids for prompt in prompts]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda engine: engine.generate(prompts * 5, params), (one, other)))
    for results in both:
        assert [result.token_ids for result in results] == expected * 5
    assert idle_store(other)["damaged"] == 0


def test_tenants_share_nothing(sharing: DaricEngine) -> None:
    prompt = make_prompt((5, 6))
    mine = sharing.generate(prompt, sampling(1), namespace="tenant-a")
    assert mine.metrics.loaded_tokens == mine.metrics.engine_hit_tokens == 0
    theirs = sharing.generate(prompt, sampling(1), namespace="tenant-b")
    assert theirs.metrics.loaded_tokens == theirs.metrics.engine_hit_tokens == 0
    again = sharing.generate(prompt, sampling(1), namespace="tenant-a", ratio=0.3)
    assert again.metrics.generated_tokens == 0
    plain = [
        sharing.generate(prompt, sampling(1), namespace=name, reuse=False)
        for name in ("tenant-a", "tenant-b")
    ]
    assert [result.metrics.engine_hit_tokens for result in plain] == [0, 0]


def test_damaged_files_are_misses(beside: DaricEngine, directory: Path, world: list[int]) -> None:
    """Deleted, truncated, altered and foreign files while serving: the right answer, computed anew."""
    engine = beside
    prompt = make_prompt((0, 1, 2, 3, 4, 5))
    reference = engine.generate(prompt, sampling(), reuse=False)
    files = sorted(directory.rglob("*.kv"))
    assert len(files) >= 12
    for number, file in enumerate(files):
        if number % 4 == 0:
            file.unlink()
        elif number % 4 == 1:
            os.truncate(file, file.stat().st_size // 2)
        elif number % 4 == 2:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 0x10
            file.write_bytes(content)
        else:
            file.write_bytes(files[number - 1].read_bytes())
    exact = engine.generate(prompt, sampling(), selection="all")
    assert_same_answer(reference, exact)
    damaged = fresh_metrics(engine, (6, 7, 8, 9), world)
    assert damaged.generated_tokens > 0
    assert_adds_up(damaged)
    whole = engine.generate(prompt, sampling(), namespace="whole")
    # A cap that caps nothing: a world of its own in vLLM's prefix cache, where only our cache can hit.
    mended = engine.generate(prompt, sampling(), max_fraction=0.95)
    assert_same_answer(whole, mended)
    _find_damage_in_mid_pass(engine, directory, prompt, whole)
    assert idle_store(engine)["damaged"] > 0


def _find_damage_in_mid_pass(
    engine: DaricEngine, directory: Path, prompt: ChunkedPrompt, whole: GenerationResult
) -> None:
    """Damage behind a sound header is met by the forward pass, which others take part in too."""
    company = make_prompt((50, 51, 52))
    decoding, prefilling = (
        engine.generate(company, sampling(length, ignore_eos=True), reuse=False) for length in (150, 6)
    )
    # Other documents take the place in host memory; what the prompt needs is on disk only.
    engine.generate(make_prompt((6, 7, 8, 9)), sampling(1), max_fraction=0.9)
    deadline = time.monotonic() + 20
    while engine.stats()["store"]["pending_writes"] and time.monotonic() < deadline:
        time.sleep(0.05)
    for file in directory.rglob("*.kv"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 0x10
        file.write_bytes(content)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(
            engine.generate, company, sampling(150, ignore_eos=True), reuse=False, namespace="decoding"
        )
        time.sleep(0.1)
        mended, plain = asyncio.run(_both(engine, prompt, company))
        assert_same_answer(decoding, beside.result())
    assert mended.metrics.failed_segments > 0
    assert_adds_up(mended.metrics)
    assert_same_answer(whole, mended)
    assert_same_answer(prefilling, plain)


async def _both(
    engine: DaricEngine, prompt: ChunkedPrompt, company: ChunkedPrompt
) -> tuple[GenerationResult, GenerationResult]:
    """One request with reuse (a cap that caps nothing, so that vLLM's prefix cache cannot hit), one without."""
    return await asyncio.gather(
        engine.agenerate(prompt, sampling(), max_fraction=1.0),
        engine.agenerate(company, sampling(6, ignore_eos=True), reuse=False, namespace="prefilling"),
    )


def test_redis_lost_and_found(sharing: DaricEngine, redis_server: RedisServer, world: list[int]) -> None:
    sharing.warm([make_document(seed) for seed in SEEDS], progress=False)
    usual = max(_seconds_to_answer(sharing, number, world) for number in range(4))
    redis_server.kill()
    without = [_seconds_to_answer(sharing, number, world) for number in range(4)]
    # At most a second more; the rest is for the machine's other load.
    assert max(without) < usual + 1 + 4
    redis_server.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if fresh_metrics(sharing, (2, 9), world).generated_tokens == 0:
            break
        time.sleep(0.2)
    assert fresh_metrics(sharing, (9, 2), world).generated_tokens == 0


def _seconds_to_answer(engine: DaricEngine, number: int, world: list[int]) -> float:
    started = time.monotonic()
    assert fresh_metrics(engine, (number, 11), world).prompt_tokens > 0
    return time.monotonic() - started


@dataclass(frozen=True)
class Killed:
    """An engine whose processes were killed while it wrote and answered, and what its callers were told."""

    engine: DaricEngine
    directory: Path
    warm_error: BaseException | None
    stream_error: BaseException | None
    seconds: float


KILLED_DOCUMENTS = [make_document(seed, sentences=30) for seed in range(200, 320)]
NARROW = {"storage_dtype": "bfloat16", "host_bytes": 600 << 10}
"""KV kept in bfloat16 in a host tier that holds a few documents only."""


@pytest.fixture(scope="module")
def killed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    path = tmp_path_factory.mktemp("killed")
    engine = open_engine(tiny_model, disk_path=str(path), **NARROW)
    with ThreadPoolExecutor(1) as pool:
        chunks = engine.stream(make_prompt([1]), sampling(3500, ignore_eos=True))
        next(chunks)
        warming = pool.submit(engine.warm, KILLED_DOCUMENTS, progress=False)
        deadline = time.monotonic() + 60
        while len(list(path.rglob("*.kv"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in _processes(engine):
            process.kill()
        started = time.monotonic()
        stream_error = _error_of(lambda: list(chunks))
        return Killed(engine, path, warming.exception(60), stream_error, time.monotonic() - started)


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_callers_of_a_killed_engine_are_told_at_once(killed: Killed) -> None:
    for error in (killed.warm_error, killed.stream_error):
        assert isinstance(error, DaricError) and "died" in str(error)
    with pytest.raises(DaricError):
        killed.engine.generate(make_prompt([1]), sampling(1))
    assert killed.seconds < 60
    assert killed.engine.closed
    killed.engine.close()
    killed.engine.close()
    with pytest.raises(DaricError, match="closed"):
        killed.engine.generate(make_prompt([1]), sampling(1))
    with pytest.raises(DaricError, match="closed"):
        killed.engine.stats()


@pytest.fixture(scope="module")
def narrow(tiny_model: str, killed: Killed) -> Iterator[DaricEngine]:
    """The next engine on the killed one's directory."""
    with open_engine(tiny_model, disk_path=str(killed.directory), **NARROW) as shared:
        yield shared


def test_storage_dtype_halves_the_bytes_and_changes_little(narrow: DaricEngine) -> None:
    document = make_document(300)
    narrow.warm([document], progress=False)
    tokens = len(narrow.processor.warm_chunk(document).token_ids)
    # 2 layers, K and V, 2 heads of 32 numbers of 2 bytes
    assert idle_store(narrow)["host_bytes"] == tokens * 2 * 2 * 2 * 32 * 2
    prompt = make_prompt((300, 301))
    generated = narrow.generate(prompt, sampling(1), n_avg=16)
    loaded = narrow.generate(prompt, sampling(1), n_avg=16, ratio=0.11)
    assert loaded.metrics.generated_tokens == 0
    assert 0 < largest_difference(generated, loaded) < 0.3


def test_what_was_written_before_the_kill_hits(narrow: DaricEngine, killed: Killed) -> None:
    warmed = narrow.warm(KILLED_DOCUMENTS, progress=False)
    assert warmed.cached_documents > 0
    prompt = make_prompt((1,))
    exact = narrow.generate(prompt, sampling(), selection="all")
    assert_same_answer(narrow.generate(prompt, sampling(), reuse=False), exact)
    # Those of the killed engine; this one's own are there only while it writes.
    wait_until(lambda: not list(killed.directory.rglob("*.tmp*")))


def test_eviction_and_aborts_leave_no_pins_and_no_growth(narrow: DaricEngine) -> None:
    async def run(first: int) -> None:
        async def one(number: int) -> None:
            prompt = make_prompt((number % 40, (number * 7) % 40))
            request = asyncio.ensure_future(narrow.agenerate(prompt, sampling(2, logprobs=None)))
            if number % 5 == 0:
                await asyncio.sleep(0.002 * (number % 7))
                request.cancel()
            await asyncio.gather(request, return_exceptions=True)

        for begin in range(first, first + 500, 10):
            await asyncio.gather(*(one(number) for number in range(begin, begin + 10)))

    asyncio.run(run(0))
    before = _resident(narrow)
    asyncio.run(run(500))
    deadline = time.monotonic() + 20
    while narrow.stats()["unfinished_requests"] and time.monotonic() < deadline:
        time.sleep(0.1)
    store = idle_store(narrow)
    assert store["evictions"] > 0
    assert store["host_bytes"] <= store["host_budget"]
    assert _resident(narrow) < before * 1.05 + (16 << 20)
    prompt = make_prompt((1, 2))
    exact = narrow.generate(prompt, sampling(), selection="all")
    assert_same_answer(narrow.generate(prompt, sampling(), reuse=False), exact)


def _processes(engine: DaricEngine) -> list[psutil.Process]:
    """vLLM's processes of an engine."""
    manager = engine._llm.engine_core.resources.engine_manager
    processes = [psutil.Process(process.pid) for process in manager.processes]
    return [*processes, *(child for process in processes for child in process.children(recursive=True))]


def _resident(engine: DaricEngine) -> int:
    return sum(process.memory_info().rss for process in _processes(engine))


def test_redis_absent_at_start(tiny_model: str) -> None:
    with pytest.raises(CacheUnavailableError, match=r"redis://.*127\.0\.0\.1:1") as error:
        open_engine(tiny_model, index="redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(error.value)


def test_unwritable_directory_at_start(tiny_model: str, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    with pytest.raises(CacheUnavailableError, match=r"disk_path=.*file/kv"):
        open_engine(tiny_model, disk_path=str(blocker / "kv"))
