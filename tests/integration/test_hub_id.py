"""A model is started by its hub id, from what vLLM's own download left, with no network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_cache import put_into_hub_cache

pytestmark = pytest.mark.integration

_SCRIPT = """
import sys
from daric_rag import ChunkedPrompt, DaricConfig, DaricEngine, register_strategy
# The engine's default, and unknown to its other processes.
register_strategy("nothing", lambda chunks, settings: [])
if __name__ == "__main__":
    config = DaricConfig(kv_pool_bytes=64 << 20, host_bytes=64 << 20, selection="nothing")
    with DaricEngine("someone/model", config, max_model_len=1024, download_dir=sys.argv[1]) as engine:
        for order in (["one " * 40, "two " * 40], ["two " * 40, "one " * 40]):
            print(engine.generate(ChunkedPrompt("s", order, "q")).metrics.loaded_tokens)
"""


def test_a_hub_id_starts_with_its_weights_in_a_directory_of_their_own(
    tiny_model: str, tmp_path: Path
) -> None:
    is_weights = {file: file.suffix == ".safetensors" for file in Path(tiny_model).iterdir()}
    for folder, wanted in (("home/hub", False), ("weights", True)):
        part = tmp_path / f"part-{wanted}"
        part.mkdir()
        for file in (file for file, is_weight in is_weights.items() if is_weight == wanted):
            (part / file.name).symlink_to(file)
        absent = [file.name for file, is_weight in is_weights.items() if is_weight != wanted]
        put_into_hub_cache(part, tmp_path / folder, "someone/model", [*absent, "pytorch_model.bin"])
    # Not offline mode, in which vLLM passes the snapshot's path on; a hub that nobody answers for.
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "weights")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = map(int, done.stdout.split())
    assert first == 0
    assert second > 64
