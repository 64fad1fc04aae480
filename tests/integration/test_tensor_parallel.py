"""Two ranks answer as one, also when what they have stored is not the same."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from daric_rag import DaricConfig, DaricEngine, GenerationResult
from tests.engine_support import assert_adds_up, assert_same_answer, idle_store, make_prompt, sampling

pytestmark = pytest.mark.integration

SELECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"reuse": False},
    "all": {"selection": "all"},
    "none": {"selection": "none"},
    "daric": {"selection": "daric", "n_avg": 24},
}
PROMPTS = {
    name: make_prompt(range(10 * number, 10 * number + 4))
    for number, name in enumerate(
        ("sound", "damaged", "deleted", "no room", "killed", "fill 1", "fill 2", "fill 3")
    )
}
# One token takes 512 bytes on each of the two ranks, a prompt some 200 KB: six prompts push out a seventh.
HOST_BYTES = 768 << 10
HANGS_S = 60.0


@dataclass(frozen=True)
class Ranks:
    """An engine of two ranks, its disk tier's directory, and the processes that came with it."""

    engine: DaricEngine
    disk: Path
    processes: list[psutil.Process]

    def ask(self, prompt: str, selection: str = "none", world: int = 0, **options: Any) -> GenerationResult:
        """One answer, or an error if the engine stalls. Each world is a prefix cache of its own."""
        # A cap of (nearly) the whole prompt caps nothing.
        options = {**SELECTIONS[selection], "max_fraction": 1 - world / 1000, **options}
        return self.within(lambda: self.engine.generate(PROMPTS[prompt], sampling(), **options))

    def within(self, work: Callable[[], Any]) -> Any:
        """The result of `work`; a stall ends the engine's processes."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        if not wait([result], HANGS_S).done:
            self.kill()
            raise AssertionError("the ranks wait for each other")
        return result.result()

    def kill(self) -> None:
        """SIGKILL to the engine core and to both workers at once."""
        for process in self.processes:
            process.kill()
        psutil.wait_procs(self.processes, 10)

    def files(self, rank: int) -> dict[str, Path]:
        """The records of a rank."""
        return {path.name: path for path in self.disk.glob(f"*/{rank}/*/*.kv")}

    def store(self, prompt: str) -> list[Path]:
        """Ask, wait until the new records are on disk, push them out of memory; returns rank 1's files."""
        self.written()
        before = set(self.files(1))
        self.ask(prompt)
        self.written()
        new = self.files(1).keys() - before
        assert new
        self.push_out()
        return [self.files(1)[name] for name in new]

    def push_out(self) -> None:
        """Have other prompts take the place in host memory."""
        for _ in range(2):
            for name in ("fill 1", "fill 2", "fill 3"):
                self.ask(name, namespace=f"{time.monotonic_ns()}")

    def written(self) -> None:
        """Wait until all ranks have nothing more to write."""
        deadline = time.monotonic() + HANGS_S
        while self.within(self.engine.stats)["store"]["pending_writes"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextmanager
def two_ranks(model: str, disk: Path) -> Iterator[Ranks]:
    config = DaricConfig(
        kv_pool_bytes=32 << 20, host_bytes=HOST_BYTES, disk_path=str(disk), disk_bytes=256 << 20
    )
    me = psutil.Process()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        others = set(me.children(recursive=True))
        engine = DaricEngine(
            model,
            config,
            max_model_len=1024,
            tensor_parallel_size=2,
            distributed_executor_backend="mp",
        )
    with engine:
        yield Ranks(engine, disk, [one for one in me.children(recursive=True) if one not in others])


@pytest.fixture(scope="module")
def answers(tiny_model: str) -> dict[tuple[str, str], GenerationResult]:
    """What an engine of one rank says, by prompt and selection."""
    config = DaricConfig(kv_pool_bytes=32 << 20, host_bytes=32 << 20)
    with DaricEngine(tiny_model, config, max_model_len=1024) as engine:
        return {
            (name, selection): engine.generate(prompt, sampling(), **options)
            for name, prompt in PROMPTS.items()
            for selection, options in SELECTIONS.items()
        }


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def ranks(tiny_model: str, disk: Path) -> Iterator[Ranks]:
    with two_ranks(tiny_model, disk) as started:
        yield started


@pytest.mark.parametrize("selection", SELECTIONS)
def test_cold_and_warm(answers: Any, ranks: Ranks, selection: str) -> None:
    results = [ranks.ask("sound", selection, world, namespace=selection) for world in range(2)]
    for result in results:
        assert_same_answer(result, answers["sound", selection])
        assert_adds_up(result.metrics)
    cold, warm = (result.metrics for result in results)
    if selection != "plain":
        assert (cold.loaded_tokens, warm.generated_tokens) == (0, 0)
        assert cold.generated_tokens == warm.loaded_tokens > 0
    idle_store(ranks.engine)


def test_one_ranks_files_are_damaged(ranks: Ranks, answers: Any) -> None:
    """Found in the middle of a pass by one rank alone: both repeat it."""
    files = ranks.store("damaged")
    for path in files:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    check_lost_and_regained(ranks, answers, "damaged")


def test_one_ranks_files_are_deleted(ranks: Ranks, answers: Any) -> None:
    for path in ranks.store("deleted"):
        path.unlink()
    check_lost_and_regained(ranks, answers, "deleted")


def check_lost_and_regained(ranks: Ranks, answers: Any, prompt: str) -> None:
    lost = ranks.ask(prompt, world=1)
    again = ranks.ask(prompt, world=2)
    for result in (lost, again):
        assert_same_answer(result, answers[prompt, "none"])
        assert_adds_up(result.metrics)
    assert lost.metrics.failed_segments > 0 and lost.metrics.generated_tokens > 0
    assert again.metrics.failed_segments == again.metrics.generated_tokens == 0
    idle_store(ranks.engine)


def test_one_ranks_disk_takes_nothing(ranks: Ranks, answers: Any) -> None:
    """What one rank could not keep is generated on both; when there is room again, it is stored again."""
    (directory,) = ranks.disk.glob("*/1")
    aside = directory.with_name("aside")
    directory.rename(aside)
    directory.touch()
    ranks.ask("no room")
    ranks.push_out()
    without = ranks.ask("no room", "daric", world=1)
    directory.unlink()
    aside.rename(directory)
    ranks.ask("no room", world=2)
    stored = ranks.ask("no room", "daric", world=3)
    for result in (without, stored):
        assert_same_answer(result, answers["no room", "daric"])
        assert_adds_up(result.metrics)
    assert without.metrics.generated_tokens > 0
    assert stored.metrics.failed_segments == stored.metrics.generated_tokens == 0
    idle_store(ranks.engine)


def test_killed_and_started_again(ranks: Ranks, answers: Any, tiny_model: str, disk: Path) -> None:
    """Over whatever each rank had written, and with one rank's files deleted and damaged."""
    ranks.ask("killed")
    ranks.kill()
    for number, path in enumerate(sorted(ranks.files(1).values())):
        if number % 3 == 0:
            path.unlink()
        elif number % 3 == 1:
            os.truncate(path, path.stat().st_size - 1)
    with two_ranks(tiny_model, disk) as again:
        for prompt in ("sound", "damaged", "deleted", "no room", "killed"):
            for world in range(2):
                result = again.ask(prompt, "daric", world)
                assert_same_answer(result, answers[prompt, "daric"])
                assert_adds_up(result.metrics)
            assert result.metrics.failed_segments == result.metrics.generated_tokens == 0
        idle_store(again.engine)
