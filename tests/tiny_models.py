"""Small random checkpoints of real architectures, for tests that need a model of a certain kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    StableLmConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from daric_rag.models import resolve_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VOCABULARY = 49152
_ROPE_THETA = 10000.0

# 4 query and 2 key/value heads divide by a tensor-parallel size of 2. The head dimension of 32 is the
# smallest that the CPU attention backend takes.
_SHAPE: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama(rope_type: str, **scaling: Any) -> PreTrainedConfig:
    return LlamaConfig(
        **_SHAPE, rope_parameters={"rope_type": rope_type, "rope_theta": _ROPE_THETA, **scaling}
    )


def _llama3() -> PreTrainedConfig:
    return _llama(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
    )


def _gptj() -> PreTrainedConfig:
    return GPTJConfig(
        vocab_size=_VOCABULARY,
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=2048,
        rotary_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


TINY_MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _llama("default"),
    "llama-linear": lambda: _llama("linear", factor=4.0),
    "llama-llama3": _llama3,
    "llama-yarn": lambda: _llama("yarn", factor=4.0, original_max_position_embeddings=2048),
    "qwen2": lambda: Qwen2Config(
        **_SHAPE, rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA}
    ),
    "mistral": lambda: MistralConfig(
        **_SHAPE,
        sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
    ),
    # Partial rotary, NeoX pairs: 8 of 32 coordinates turn.
    "stablelm": lambda: StableLmConfig(
        **_SHAPE,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA, "partial_rotary_factor": 0.25},
    ),
    # Partial rotary, interleaved pairs: 16 of 32 coordinates turn.
    "gptj": _gptj,
}
"""Kind of tiny model -> its configuration."""


def make_tiny_model(kind: str, directory: Path, seed: int = 0) -> Path:
    """Write a float32 checkpoint of `kind` (a key of `TINY_MODELS`) with the embedded model's tokenizer.

    The weights are larger than an initialisation for training would be, so that attention depends on the keys
    and a wrong rotation shows in the output. The same seed gives the same weights. Returns `directory`.
    """
    config = TINY_MODELS[kind]()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() == 2:
                    weights.normal_(std=1.5 * weights.shape[1] ** -0.5)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer = Path(resolve_model("smollm2-135m", progress=False))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory / name)
    return directory


def make_tiny_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter for the `llama` of `make_tiny_model` that changes its queries, keys and values.

    Returns `directory`.
    """
    rank = 4
    shape = _llama("default").to_dict()
    hidden, head_dim = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    widths = {"q_proj": hidden, "k_proj": 2 * head_dim, "v_proj": 2 * head_dim}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, width in widths.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for half, size in (("lora_A", (rank, hidden)), ("lora_B", (width, rank))):
                weights[f"{module}.{half}.weight"] = 0.3 * torch.randn(*size, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": list(widths),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
