"""The disk tier under what really happens to it: kills, full disks, other processes, missing rights."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(action: str, path: Path, *options: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.integration.disk_process", action, str(path), *map(str, options)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_killed_while_writing_twenty_times(tmp_path: Path) -> None:
    seed = secrets.token_hex(4)
    print(f"seed {seed}")
    rounds = run("kill", tmp_path, 20, seed)["rounds"]
    durable: set[int] = set()
    for outcome in rounds:
        found = outcome["found"]
        durable |= set(outcome["told"])
        assert durable <= set(found["hits"]), "what was on disk before the kill must hit after it"
        assert found["damaged"] == 0, "a kill leaves whole records or none"
        assert found["temporaries"] == 0, "orphans are removed at start"
        assert found["files"] == len(found["hits"])
    assert durable, "no kill came late enough to show anything"
    assert any(outcome["cut_short"] for outcome in rounds), "no kill came in the middle of a write"


def test_processes_that_write_the_same_segments(tmp_path: Path) -> None:
    result = run("together", tmp_path, 3, 24)
    assert result["statuses"] == [0, 0, 0]
    assert result["found"] == {"hits": list(range(24)), "damaged": 0, "temporaries": 0, "files": 24}


def check_full_disk(result: dict[str, Any], path: Path) -> None:
    assert result["served"], "requests go on"
    assert result["read_only"] and result["write_errors"] >= 3
    assert result["files_when_full"] == 1 and result["still_read"]
    assert len(result["warnings"]) == 1 and str(path) in result["warnings"][0]
    assert result["recovered"]
    assert result["found"] == {"hits": list(range(6)), "damaged": 0, "temporaries": 0, "files": 6}


def test_file_size_limit(tmp_path: Path) -> None:
    check_full_disk(run("fill", tmp_path, "limit"), tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_full_disk(small_disk: Path) -> None:
    check_full_disk(run("fill", small_disk, "ballast"), small_disk)


def test_directory_that_may_not_be_written_is_named() -> None:
    with tempfile.TemporaryDirectory() as path:  # not in tmp_path, which another user cannot even enter
        error = run("unwritable", Path(path))["error"]
        os.chmod(path, 0o700)
    assert path in error and "disk_path" in error
