"""What tells KV of different weights apart."""

from __future__ import annotations

from pathlib import Path

from daric_rag.engine.fingerprint import adapter_fingerprint
from tests.tiny_models import make_tiny_adapter


def test_adapters_differ_by_name_and_by_every_file(tmp_path: Path) -> None:
    first = str(make_tiny_adapter(tmp_path / "first", 1))
    same = str(make_tiny_adapter(tmp_path / "same", 1))
    other = str(make_tiny_adapter(tmp_path / "other", 2))
    assert adapter_fingerprint("a", first) == adapter_fingerprint("a", same)
    assert adapter_fingerprint("a", first) != adapter_fingerprint("b", first)
    assert adapter_fingerprint("a", first) != adapter_fingerprint("a", other)
    config = tmp_path / "same" / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 8'))
    assert adapter_fingerprint("a", first) != adapter_fingerprint("a", same)


def test_an_adapter_that_is_not_here_is_its_name_and_path(tmp_path: Path) -> None:
    paths = ["someone/adapter", "someone/other", str(tmp_path)]
    assert len({adapter_fingerprint("a", path) for path in paths}) == 3
