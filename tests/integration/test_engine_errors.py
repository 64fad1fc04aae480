"""Bad input is refused before anything is scheduled; a dead engine says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from daric_rag import (
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    DaricEngine,
    DaricError,
    Document,
    Live,
)
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


def test_no_prompts_give_no_results(engine: DaricEngine) -> None:
    assert engine.generate([]) == []


def test_integers_of_every_kind_are_token_ids(engine: DaricEngine) -> None:
    import numpy as np

    document = engine.processor.warm_chunk(make_document(7)).token_ids
    arrays = [np.array(document, dtype=kind) for kind in (np.int32, np.uint16, np.int64)]
    assert engine.warm(arrays, progress=False).documents == 1  # type: ignore[arg-type]
    params = SamplingParams(temperature=np.float64(0.0), max_tokens=np.int64(3), logprobs=np.int8(1))
    for array in arrays:
        prompt = ChunkedPrompt("s", [array, Live(array[:5])], "q")
        metrics = engine.generate(prompt, params).metrics
        assert metrics.generated_tokens == 0
        assert metrics.loaded_tokens + metrics.engine_hit_tokens >= len(document)
    same = [engine.generate(one, params).text for one in (arrays[0], list(arrays[2]), document)]
    assert len(set(same)) == 1
    assert [one.text for one in engine.generate(np.array([document] * 2), params)] == same[:2]


_NO_TOKENS = st.sampled_from(
    [[-1], [10**6], [2**40], [True], [1.5], ["a"], [None], [[1]], b"x", 5, None, {1, 2}]
)
_NO_PROMPTS = st.one_of(
    _NO_TOKENS.filter(lambda value: value != ["a"] and value != [[1]]),
    st.just(""),
    st.just("a word " * 5000),
    st.just([1] * 5000),
    _NO_TOKENS.map(lambda value: lambda: ChunkedPrompt("s", ["d", value], "q")),
    _NO_TOKENS.map(lambda value: lambda: ChunkedPrompt("s", ["d", Live(value)], "q")),
    _NO_TOKENS.map(lambda value: lambda: ChatPrompt([ChatMessage("user", ["q", Document(value)])])),
    st.sampled_from([lambda: ChatPrompt([]), lambda: ChatPrompt([ChatMessage("user", "q")], tools=5)]),
)
_NO_PARAMETERS = st.sampled_from(
    [
        5,
        {"max_tokens": 1},
        lambda: _sampling(max_tokens=8.0),
        lambda: _sampling(max_tokens=0),
        lambda: _sampling(seed=2**80),
        lambda: _sampling(logprobs=10**6),
        lambda: _sampling(stop=[b"x"]),
        lambda: _sampling(extra_args={"mine": object()}),
        lambda: _sampling(allowed_token_ids=[10**8]),
        lambda: _sampling(logit_bias={10**8: 1.0}),
        lambda: _sampling(structured_outputs=StructuredOutputsParams(regex="(")),
        lambda: _spoilt(_sampling(), temperature=-1.0),
        lambda: _spoilt(_sampling(), n="many"),
    ]
)
_NO_ADAPTERS = st.sampled_from(
    [5, "adapter", lambda: LoRARequest("a", 1, "/nowhere"), lambda: LoRARequest(1, 1, "x")]
)
_NO_OPTIONS = st.sampled_from([{"n_avg": 0}, {"selection": "best"}, {"namespace": 5}, {"unknown": 1}])


def _sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **fields})


def _spoilt(params: SamplingParams, **fields: Any) -> SamplingParams:
    for name, value in fields.items():
        setattr(params, name, value)
    return params


def _made(value: Any) -> Any:
    return value() if callable(value) else value


@settings(max_examples=150)
@given(
    call=st.sampled_from(["generate", "many", "stream", "warm"]),
    wrong=st.one_of(
        _NO_PROMPTS.map(lambda value: ("prompt", value)),
        _NO_PARAMETERS.map(lambda value: ("params", value)),
        _NO_ADAPTERS.map(lambda value: ("adapter", value)),
        _NO_OPTIONS.map(lambda value: ("options", value)),
    ),
)
def test_a_rejected_request_is_one_clear_error(
    engine: DaricEngine, call: str, wrong: tuple[str, Any]
) -> None:
    place, value = wrong
    prompt, params, adapter, options = make_prompt([1]), _sampling(), None, {}
    with pytest.raises((ValueError, VLLMValidationError, TypeError), match=r"\w") as error:
        value = _made(value)
        if place == "prompt":
            prompt = value
        elif place == "params":
            params = value
        elif place == "adapter":
            adapter = value
        else:
            options = value
        if call == "generate":
            engine.generate(prompt, params, lora_request=adapter, **options)
        elif call == "many":
            engine.generate(
                [make_prompt([1]), prompt], [_sampling(), params], lora_request=adapter, **options
            )
        elif call == "stream":
            list(engine.stream(prompt, params, lora_request=adapter, **options))
        elif place == "prompt" and not isinstance(prompt, ChunkedPrompt | ChatPrompt | str):
            engine.warm(["good", prompt], progress=False)
        elif place == "adapter":
            engine.warm(["good"], progress=False, lora_request=adapter)
        else:
            raise ValueError("not a call of warm")
    # What vLLM's own constructors raise was never seen by the engine.
    if not isinstance(error.value, ValueError):
        assert "daric_rag" not in {frame.path.parts[-2] for frame in error.traceback}


def test_rejected_requests_leave_nothing_behind(engine: DaricEngine) -> None:
    """Runs after the test above, on the same engine."""
    assert engine.generate(make_prompt([1]), sampling(1), reuse=False).completions
    stats = engine.stats()
    assert stats["unfinished_requests"] == 0
    assert (stats["store"]["pins"], stats["store"]["tracked_requests"]) == (0, 0)


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
