"""The embedded models themselves: real packages, real conversion, real answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from daric_rag.models import resolve_embedder, resolve_model, verify_model

pytestmark = pytest.mark.integration

TEXTS = [
    "plain text, with punctuation; and 'quotes'",
    "a  22   333 x1y2",
    "\ttabs\n\n\nnew lines\r\n",
    "été ☃ 你好 🙂",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.fixture(scope="module")
def model_path() -> str:
    return resolve_model("smollm2-135m")


def test_prepared_files_are_intact(model_path: str) -> None:
    assert verify_model(model_path) == ()


def test_weights_are_plain_float32(model_path: str) -> None:
    config = json.loads((Path(model_path) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(str(Path(model_path) / "model.safetensors"), "pt") as weights:
        names = list(weights.keys())
        assert len(names) == 272
        assert weights.get_tensor("model.embed_tokens.weight").dtype == torch.float32
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}


def test_tokenizer(model_path: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    # SmolLM2 keeps every digit apart from the white space before it.
    assert tokenizer.tokenize("a  22") == ["a", "ĠĠ", "2", "2"]
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )


def test_greedy_answer(model_path: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    network = AutoModelForCausalLM.from_pretrained(model_path)
    assert network.dtype == torch.float32
    ends = network.generation_config.eos_token_id
    assert ends == [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = network.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_two_processes_prepare_at_once(model_path: str, tmp_path: Path) -> None:
    """Both get the same intact directory, and its weights are bit for bit those prepared before."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    script = (
        "from daric_rag.models import resolve_model; print(resolve_model('smollm2-135m', progress=False))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=600)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert verify_model(outputs[0]) == ()
    names = {path.name for path in Path(outputs[0]).parent.iterdir()}
    assert names == {Path(outputs[0]).name, f".{Path(outputs[0]).name}.lock"}
    for name in ("model.safetensors", "tokenizer.json"):
        assert (Path(outputs[0]) / name).read_bytes() == (Path(model_path) / name).read_bytes()


def test_embedder() -> None:
    from sentence_transformers import SentenceTransformer

    embedder = SentenceTransformer(resolve_embedder("all-minilm-l6-v2"), device="cpu", local_files_only=True)
    texts = ["Paris lies in France", "the capital of France", "bananas are yellow"]
    vectors = embedder.encode(texts, normalize_embeddings=True)
    assert vectors.shape == (3, 384)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3
