"""A program of somebody's: a model by its hub id from an incomplete snapshot, and a strategy of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_cache import put_into_hub_cache

pytestmark = pytest.mark.integration

_PROGRAM = """
from daric_rag import ChunkedPrompt, DaricConfig, DaricEngine, register_strategy

# The engine's default, and unknown to its other processes.
register_strategy("nothing", lambda chunks, settings: [])
if __name__ == "__main__":
    config = DaricConfig(kv_pool_bytes=64 << 20, host_bytes=64 << 20, selection="nothing")
    with DaricEngine("someone/model", config, max_model_len=1024) as engine:
        for order in (["one " * 40, "two " * 40], ["two " * 40, "one " * 40]):
            metrics = engine.generate(ChunkedPrompt("s", order, "q")).metrics
            print("told:", metrics.loaded_tokens, metrics.recomputed_tokens - metrics.live_tokens)
"""


def test_a_program_with_a_hub_id_and_a_strategy_of_its_own(tiny_model: str, tmp_path: Path) -> None:
    put_into_hub_cache(Path(tiny_model), tmp_path / "hub", "someone/model", ["pytorch_model.bin"])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("told:")]
    first, second = (tuple(map(int, values)) for values in told)
    assert first == (0, 0)
    assert second[0] > 64 and second[1] == 0
