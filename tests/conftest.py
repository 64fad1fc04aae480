"""Engines that tests share: a start costs far more than a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# A busy machine is no failure. The same examples everywhere; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("daric", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "daric"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

if TYPE_CHECKING:
    from daric_rag import DaricEngine


@pytest.fixture(scope="session")
def engine() -> Iterator[DaricEngine]:
    """The embedded model with default settings: prefix caching on, prompts in one step."""
    from daric_rag import DaricConfig, DaricEngine

    config = DaricConfig(kv_pool_bytes=512 << 20, host_bytes=512 << 20)
    with DaricEngine("smollm2-135m", config, max_model_len=4096) as shared:
        yield shared


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random Llama, for engines that differ in their settings."""
    from tests.tiny_models import make_tiny_model

    path: Path = tmp_path_factory.mktemp("models") / "llama"
    return str(make_tiny_model("Llama", path))
