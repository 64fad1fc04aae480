"""`scripts/gpu-check` on a machine without a GPU; the rest of it is for machines that have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu-check"


def run(python: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_without_a_gpu_it_says_so_and_has_a_status_of_its_own() -> None:
    done = run(sys.executable)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [
        f"No GPU: the torch of {sys.executable} sees no CUDA device, so nothing was checked."
    ]


def test_an_interpreter_without_torch_is_a_failure_not_a_machine_without_a_gpu(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    python.chmod(0o755)
    done = run(str(python))
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr
