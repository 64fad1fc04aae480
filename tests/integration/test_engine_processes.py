"""The engine's threads and processes: what runs where, and who ends with whom."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from daric_rag import DaricConfig, DaricEngine
from daric_rag.errors import EngineClosedError
from tests.engine_support import make_document, make_prompt, sampling
from tests.integration.engine_process import DOCUMENTS
from tests.process_support import engine_processes, in_fork, still_running

pytestmark = pytest.mark.integration

GONE_WITHIN_S = 5.0
PATIENCE_S = 60.0
GATE_S = 20.0


# ---- texts are read beside the loop that hands out tokens ----


class Gate:
    """Stands for a tokenizer that takes its time: it waits until it is opened."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.reached = threading.Event()
        self.held_up = False
        self._opened = threading.Event()
        self._work = work

    def __call__(self, *arguments: Any) -> Any:
        self.reached.set()
        self.held_up |= not self._opened.wait(GATE_S)
        return self._work(*arguments)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(engine: DaricEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Closed in front of every document that is to be warmed."""
    closed = Gate(engine.processor.warm_chunk)
    monkeypatch.setattr(engine.processor, "warm_chunk", closed)
    yield closed
    closed.open()


def test_a_stream_goes_on_while_documents_are_tokenised(engine: DaricEngine, gate: Gate) -> None:
    stream = engine.stream(make_prompt([901]), sampling(12, ignore_eos=True))
    next(stream)
    warming = threading.Thread(
        target=lambda: engine.warm([make_document(n) for n in range(910, 920)], progress=False)
    )
    warming.start()
    assert gate.reached.wait(PATIENCE_S)
    rest = list(stream)
    assert not gate.held_up
    assert rest[-1].metrics.completion_tokens == 12
    assert engine.stats()["unfinished_requests"] == 0
    gate.open()
    warming.join()


def test_warming_can_be_cancelled_while_documents_are_tokenised(engine: DaricEngine, gate: Gate) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(
            engine.awarm([make_document(n) for n in range(920, 960)], progress=False)
        )
        await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    before = engine.stats()
    asyncio.run(cancel())
    gate.open()
    # Texts are read in the order of arrival: what follows is answered after all of the warming's.
    assert engine.generate(make_prompt([901]), sampling(1), reuse=False).token_ids
    after = engine.stats()
    assert after["unfinished_requests"] == 0
    assert after["store"]["host_records"] == before["store"]["host_records"]


def test_nothing_is_computed_if_one_document_is_too_long(engine: DaricEngine) -> None:
    before = engine.stats()["store"]["host_records"]
    documents = [*(make_document(n) for n in range(960, 990)), make_document(990, sentences=400)]
    with pytest.raises(ValueError, match="4095"):
        engine.warm(documents, progress=False)
    assert engine.stats()["store"]["host_records"] == before


# ---- a fork has no part of an engine ----

ENGINE_CALLS: dict[str, Callable[[DaricEngine], object]] = {
    "generate": lambda engine: engine.generate("Hello"),
    "agenerate": lambda engine: asyncio.run(engine.agenerate("Hello")),
    "stream": lambda engine: next(iter(engine.stream("Hello"))),
    "warm": lambda engine: engine.warm([make_document(1)], progress=False),
    "stats": lambda engine: engine.stats(),
    "register": lambda engine: engine.register([make_document(1)]),
    "tokenize": lambda engine: engine.processor.tokenize("Hello"),
}


def test_an_engine_after_a_fork(engine: DaricEngine) -> None:
    for name, call in ENGINE_CALLS.items():
        answer = in_fork(lambda call=call: call(engine))  # type: ignore[misc]
        assert answer.startswith(f"DaricError: this {'tokenizer' if name == 'tokenize' else 'engine'}"), name
        assert f"belongs to process {os.getpid()}" in answer, name
        assert "after the fork" in answer, name
    assert in_fork(lambda: (engine.closed, engine.close())) == "(True, None)"
    assert engine.generate(make_prompt([901]), sampling(1)).token_ids


@dataclasses.dataclass
class Pipeline:
    llm: Any


def test_copies_share_the_engine_and_pickles_say_why_not(engine: DaricEngine) -> None:
    from daric_rag.integrations.langchain import ChatDaric
    from daric_rag.integrations.langchain import DaricLLM as LangChainLLM
    from daric_rag.integrations.llama_index import DaricLLM as LlamaIndexLLM

    for copied in (copy.copy(engine), copy.deepcopy(engine), dataclasses.asdict(Pipeline(engine))["llm"]):
        assert copied is engine
    llama_index = LlamaIndexLLM(engine=engine)
    assert llama_index.metadata.context_window == engine.max_model_len
    for model in (LangChainLLM(engine=engine), ChatDaric(engine=engine), llama_index):
        for copied in (copy.copy(model), copy.deepcopy(model), dataclasses.asdict(Pipeline(model))["llm"]):
            assert copied.engine is engine
        with pytest.raises(TypeError, match=r"engine cannot be pickled.*belong to this process"):
            pickle.dumps(model)
    assert copy.deepcopy(llama_index).metadata.tokenizer("Hello")


# ---- whoever started an engine ends, in whatever way ----


def start_server(model: str, directory: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process with an engine that has warmed its documents, and what it tells of itself."""
    command = [sys.executable, "-m", "tests.integration.engine_process", model, str(directory)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        if line.startswith("{"):
            return server, json.loads(line)
    raise AssertionError(f"the engine did not start; status {server.wait()}")


def end_of_program(server: subprocess.Popen[str]) -> None:
    assert server.stdin is not None
    server.stdin.close()


def test_an_engine_ends_with_its_process_and_loses_nothing(tiny_model: str, tmp_path: Path) -> None:
    """Killed twice, and at last its program is over without having closed it."""
    stored_before = 0
    for end in (subprocess.Popen.kill, subprocess.Popen.terminate, end_of_program):
        server, told = start_server(tiny_model, tmp_path)
        processes = [psutil.Process(pid) for pid in told["processes"]]
        end(server)
        server.wait(PATIENCE_S)
        assert still_running(processes, GONE_WITHIN_S) == []
        assert (told["documents"], told["stored_before"]) == (len(DOCUMENTS), stored_before)
        stored_before = len(DOCUMENTS)


# ---- an engine that does not come to its end in the usual way ----


def test_whoever_waits_for_an_engine_that_is_closed_is_told(tiny_model: str) -> None:
    others = {process.pid for process in engine_processes()}
    engine = DaricEngine(tiny_model, DaricConfig(kv_pool_bytes=64 << 20, host_bytes=64 << 20))
    endless = sampling(100_000, ignore_eos=True)
    running = threading.Barrier(3)
    errors: list[BaseException] = []

    def ask(call: Callable[[], object]) -> None:
        with pytest.raises(EngineClosedError) as told:
            call()
        errors.append(told.value)

    def consume() -> None:
        stream = engine.stream(make_prompt([1]), endless)
        next(stream)
        running.wait(PATIENCE_S)
        list(stream)

    def generate() -> None:
        running.wait(PATIENCE_S)
        engine.generate([make_prompt([n]) for n in range(4)], endless)

    threads = [threading.Thread(target=ask, args=(call,)) for call in (consume, generate)]
    for thread in threads:
        thread.start()
    running.wait(PATIENCE_S)
    closing = [threading.Thread(target=engine.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    for thread in (*closing, *threads):
        thread.join(PATIENCE_S)
    assert len(errors) == 2
    assert engine.closed
    assert {process.pid for process in engine_processes()} == others


def test_a_constructor_that_fails_late_leaves_nothing_behind(tiny_model: str) -> None:
    threads = threading.active_count()
    others = {process.pid for process in engine_processes()}
    with pytest.raises(ValueError, match="must be a single token"):
        DaricEngine(tiny_model, DaricConfig(kv_pool_bytes=64 << 20, padding="two words"), max_model_len=1024)
    assert {process.pid for process in engine_processes()} == others
    assert threading.active_count() <= threads
