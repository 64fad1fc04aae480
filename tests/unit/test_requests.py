"""What is sent to vLLM: parameters as the engine's process will read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from daric_rag import ChatPrompt, ChunkedPrompt
from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.requests import build_request, checked_adapter, is_one_prompt

PROMPT = ProcessedPrompt([1, 2, 3])


def sampling_of(**fields: Any) -> SamplingParams:
    return build_request(PROMPT, SamplingParams(**fields), DaricConfig(), stream=False)[1]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", np.int64(8), 8),
        ("temperature", np.float32(0.5), 0.5),
        ("seed", np.uint64(2**63), 2**63),
        ("logprobs", np.int32(2), 2),
        ("logit_bias", {np.int64(4): np.float64(1.0)}, {4: 1.0}),
        ("allowed_token_ids", [np.int32(5), 6], [5, 6]),
        ("extra_args", {"mine": {"a": [np.float64(1.5)]}}, {"mine": {"a": [1.5]}}),
    ],
)
def test_numbers_of_numpy_are_numbers(field: str, value: Any, expected: Any) -> None:
    read = getattr(sampling_of(**{field: value}), field)
    assert read == expected
    assert "numpy" not in type(read).__module__


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 8.0),
        ("max_tokens", True),
        ("temperature", True),
        ("seed", 1.5),
        ("seed", 2**70),
        ("stop", [b"x"]),
        ("detokenize", 1),
        ("extra_args", {"mine": object()}),
    ],
)
def test_what_the_engines_process_could_not_read_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"params: .+"):
        sampling_of(**{field: value})


def test_parameters_that_were_spoilt_later_are_refused() -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match=r"temperature.*-1\.0"):
        build_request(PROMPT, params, DaricConfig(), stream=False)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, [SamplingParams()], "greedy", 5])
def test_other_things_than_parameters_are_named(params: Any) -> None:
    with pytest.raises(ValueError, match=f"SamplingParams is expected, found {type(params).__name__}"):
        build_request(PROMPT, params, DaricConfig(), stream=False)


def test_the_callers_parameters_stay_as_they_are() -> None:
    params = SamplingParams(max_tokens=np.int64(8), extra_args={"mine": 1}, stop=["a"])
    layout = ProcessedPrompt([1] * 64, ((0, 32), (32, 64)), (False, True), ((0, 32),))
    _, sent = build_request(layout, params, DaricConfig(), stream=True)
    assert sent.extra_args is not None and set(sent.extra_args) == {"mine", "daric"}
    assert params == SamplingParams(max_tokens=np.int64(8), extra_args={"mine": 1}, stop=["a"])


def test_an_adapter_is_checked_the_same_way() -> None:
    assert checked_adapter(None) is None
    assert checked_adapter(LoRARequest("a", np.int64(3), "/x")).lora_int_id == 3
    for wrong in ("adapter", LoRARequest(5, 1, "/x"), LoRARequest("a", 1.5, "/x")):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"lora_request: .+"):
            checked_adapter(wrong)


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        ChunkedPrompt(query="q"),
        [1, 2],
        (1, 2),
        range(3),
        np.array([1, 2]),
        [np.int64(1)],
        [1.5, 2],
        [True],
    ],
)
def test_one_prompt(prompt: Any) -> None:
    assert is_one_prompt(prompt)


@pytest.mark.parametrize(
    "prompts",
    [[], ["text"], [[1, 2], [3]], np.array([[1, 2], [3, 4]]), [np.array([1])], [None], np.array(["a"])],
)
def test_many_prompts(prompts: Any) -> None:
    assert not is_one_prompt(prompts)


@pytest.mark.parametrize(
    "wrong", [5, None, b"text", {"prompt": "text"}, {1, 2}, (n for n in range(3)), ChatPrompt]
)
def test_what_is_neither_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="prompts: a ChunkedPrompt, ChatPrompt, text"):
        is_one_prompt(wrong)
