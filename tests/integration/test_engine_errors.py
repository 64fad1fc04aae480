"""Bad input is refused before anything is scheduled; a dead engine says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from daric_rag import ChunkedPrompt, DaricEngine, DaricError
from daric_rag.errors import UnsupportedModelError
from tests.engine_support import make_document, make_prompt, sampling

pytestmark = pytest.mark.integration


def test_no_documents_and_empty_ones(engine: DaricEngine) -> None:
    assert engine.generate(ChunkedPrompt("s", [], "q"), sampling(1)).metrics.num_chunks == 1
    metrics = engine.generate(ChunkedPrompt("s", ["", make_document(1), ""], "q"), sampling(1)).metrics
    assert metrics.dropped_documents == 2
    assert metrics.num_chunks == 3


def test_prompt_longer_than_the_window(engine: DaricEngine) -> None:
    long = make_document(200, sentences=400)
    with pytest.raises(
        ValueError, match=r"(\d+) tokens, .*4095.*largest chunk is number 2 of 4 with \d+ tokens"
    ):
        engine.generate([make_prompt([1]), ChunkedPrompt("s", [long, "short"], "q")], sampling(1))
    with pytest.raises(ValueError, match="4095"):
        engine.warm([long], progress=False)
    assert engine.generate(make_prompt([1]), sampling(1)).text is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_avg": 0}, "n_avg"),
        ({"ratio": 1.5}, "ratio"),
        ({"mtaf": "cubic"}, "linear, log, exp"),
        ({"selection": "best"}, "daric, epic, none, all"),
        ({"n_average": 3}, "did you mean 'n_avg'"),
        ({"host_bytes": 3}, "allowed are"),
    ],
)
def test_bad_options_of_a_call(engine: DaricEngine, options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate(make_prompt([1]), sampling(1), **options)


@pytest.mark.parametrize("prompt", ["", [], 5, None, ChunkedPrompt(documents=[[999999]])])
def test_bad_prompts(engine: DaricEngine, prompt: object) -> None:
    if prompt == []:
        assert engine.generate([]) == []
        return
    with pytest.raises(ValueError, match=r"prompt|vocabulary"):
        engine.generate(prompt, sampling(1))


def test_bad_engine_arguments_are_named() -> None:
    for name, words in {
        "max_model_length": "did you mean 'max_model_len'",
        "n_avg": "option of DaricConfig",
        "block_size": r"DaricConfig\(block_size",
    }.items():
        with pytest.raises(ValueError, match=words):
            DaricEngine("smollm2-135m", **{name: 5})


def test_misspelt_model_is_named() -> None:
    with pytest.raises((ValueError, DaricError), match="smollm2-135m"):
        DaricEngine("smollm2-135")


def test_model_that_cannot_be_reencoded(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    from daric_rag.models import resolve_model

    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=49152)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(resolve_model("smollm2-135m")) / name).read_bytes())
    with pytest.raises(UnsupportedModelError):
        DaricEngine(str(tmp_path))


def test_importing_daric_rag_is_light() -> None:
    code = (
        "import sys, daric_rag; "
        "print([name for name in ('vllm', 'torch', 'langchain_core', 'llama_index') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_other_vllm_version_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    from daric_rag.engine.model_support import check_vllm_version
    from daric_rag.errors import UnsupportedVersionError

    # The one thing that cannot exist here: a second vLLM.
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    with pytest.raises(UnsupportedVersionError, match=r"0\.33\.1.*0\.32"):
        check_vllm_version()
