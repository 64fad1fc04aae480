"""The commands as a newcomer runs them: real processes, the real model."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from daric_rag import DaricEngine, cli
from daric_rag.engine.keys import Tier
from daric_rag.engine.scheduling.index.opening import new_index, shared_disk_id
from tests.redis_server import RedisServer
from tests.storage_support import key_of, open_store, record_files, save

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """The prepared model is shared with the user's cache; what the commands store is not."""
    cache = tmp_path_factory.mktemp("cache") / "daric_rag"
    cache.mkdir()
    from daric_rag.models import models_directory, resolve_model

    resolve_model("smollm2-135m")
    (cache / "models").symlink_to(models_directory())
    return {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("docs")
    samples = ROOT / "daric_rag" / "sample_documents"
    for name in ("ferry.txt", "lighthouse.txt", "bakery.txt"):
        (path / name).write_bytes((samples / name).read_bytes())
    (path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    return path


@pytest.fixture(scope="module")
def prewarmed(environment, folder, tmp_path_factory) -> Path:
    """Where `examples/prewarm.py` put index and KV of the folder."""
    target = tmp_path_factory.mktemp("prewarmed")
    done = finished(environment, "examples/prewarm.py", str(folder), "--to", str(target))
    assert done.returncode == 0, done.stderr
    assert "skipped picture.png: binary" in done.stdout
    assert int(re.search(r"computed (\d+) tokens now", done.stdout)[1]) > 400
    return target


def finished(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )


def started(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell starts it; Ctrl-C goes to the group."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # A shell lets what it runs in the background ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.fixture
def killed() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that must not outlive a failed test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
        process.communicate()


def test_prewarming_again_does_nothing(environment, folder, prewarmed):
    files = {file: file.stat().st_mtime_ns for file in prewarmed.rglob("*") if file.is_file()}
    again = finished(environment, "examples/prewarm.py", str(folder), "--to", str(prewarmed))
    assert again.returncode == 0
    assert "Nothing to do: 3 files" in again.stdout
    assert files == {file: file.stat().st_mtime_ns for file in prewarmed.rglob("*") if file.is_file()}


def test_ask_answers_line_by_line_until_ctrl_c(environment, folder, prewarmed, killed):
    command = ["ask", "--docs", str(folder), "--disk", str(prewarmed / "kv"), "-k", "3"]
    process = started(environment, "-m", "daric_rag.cli", *command, "--max-tokens", "8", "--json")
    killed.append(process)
    answers = []
    for question in ("Who built the lighthouse?", "Who owns the bakery?"):
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
        answers.append(json.loads(process.stdout.readline()))
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == 130
    # Nothing of vLLM's own messages.
    assert "Traceback" not in stderr and "WARNING" not in stderr
    assert "skipped picture.png: binary" in stderr
    assert children
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert [answer["question"] for answer in answers] == ["Who built the lighthouse?", "Who owns the bakery?"]
    assert [answer["sources"][0]["id"] for answer in answers] == ["lighthouse.txt", "bakery.txt"]
    for answer in answers:
        metrics = answer["metrics"]
        assert answer["answer"]
        assert answer["reused_tokens"] == metrics["loaded_tokens"] + metrics["engine_hit_tokens"]
        # Another process stored the documents; the system prompt is new the first time.
        assert metrics["loaded_tokens"] >= 400
    assert answers[1]["metrics"]["generated_tokens"] == 0


def test_ctrl_c_while_the_engine_starts(environment, folder, killed):
    process = started(environment, "-m", "daric_rag.cli", "warm", str(folder), "--no-disk")
    killed.append(process)
    deadline = time.monotonic() + PATIENCE_S
    # vLLM's first process is there: the start is well under way.
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_ask_prints_answer_and_sources_on_stdout_and_counts_on_stderr(
    engine: DaricEngine, folder, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cli, "_end_on_sigterm", lambda: None)
    monkeypatch.setattr("daric_rag.commands.ask.start_engine", lambda *_: contextlib.nullcontext(engine))
    question = "When does the first ferry leave?"
    arguments = ["ask", "--docs", str(folder), "-k", "2", "--max-tokens", "6", "--no-disk", question]
    outputs = []
    for _ in range(2):
        assert cli.main(arguments) == 0
        outputs.append(capsys.readouterr())
    answers = [output.out.split("\n\nSources\n")[0] for output in outputs]
    assert answers[0].strip()
    assert "  1. ferry.txt  (similarity 0." in outputs[0].out
    assert "skipped picture.png: binary" in outputs[0].err
    reused, prompt = re.search(r"reused (\d+) of (\d+) prompt tokens", outputs[1].err).groups()
    # All but the question, which is shorter than a block.
    assert int(prompt) - 32 <= int(reused) < int(prompt)
    assert len([*(tmp_path / "daric_rag" / "libraries").iterdir()]) == 1


def test_warm_computes_a_folder_once(engine: DaricEngine, folder, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_end_on_sigterm", lambda: None)
    monkeypatch.setattr("daric_rag.commands.warm.start_engine", lambda *_: contextlib.nullcontext(engine))
    summaries = []
    for _ in range(2):
        assert cli.main(["warm", str(folder), "--no-disk", "--json"]) == 0
        output = capsys.readouterr()
        summaries.append(json.loads(output.out))
        assert output.err.splitlines() == ["skipped picture.png: binary"]
    assert [summary["files"] for summary in summaries] == [3, 3]
    assert [summary["documents"] for summary in summaries] == [3, 3]
    assert summaries[1]["cached_documents"] == 3
    assert summaries[1]["generated_tokens"] == 0
    assert summaries[0]["skipped_files"] == [{"name": "picture.png", "reason": "binary"}]
    assert cli.main(["warm", str(folder), "--no-disk"]) == 0
    assert "3 of them stored before" in capsys.readouterr().out


def test_cache_verify_repairs_the_shared_index(tmp_path, capsys):
    path = tmp_path / "kv"
    store = open_store(path)
    keys = [key_of(number) for number in range(3)]
    assert all(save(store, key) for key in keys) and store.flush(10)
    store.close()
    file = next(file for file in record_files(path) if file.stem == keys[1].hex())
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with RedisServer() as server:
        index = new_index(server.url, disk_id=shared_disk_id(path))
        index.insert(keys, Tier.DISK)
        index.flush()
        assert cli.main(["cache", "verify", "--disk", str(path), "--index", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["removed_keys"] == [keys[1].hex()]
        # Another engine on this folder.
        other = new_index(server.url, disk_id=shared_disk_id(path))
        assert other.lookup([[key] for key in keys]) == [1, 0, 1]
        assert cli.main(["cache", "stats", "--disk", str(path), "--index", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["shared_index"] == {"segments": 2}
        other.close()
        index.close()
