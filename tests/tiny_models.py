"""Small random checkpoints of real architectures, for tests that need a model of a certain kind."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    GPTJConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from daric_rag.models import resolve_model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_VOCABULARY = 49152

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


_PLAIN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3_ROPE = {
    **_PLAIN_ROPE,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
_YARN_ROPE = {**_PLAIN_ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.25,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}


@dataclass(frozen=True)
class TinyModel:
    """A kind of model: how its configuration is made, and what is particular about it."""

    config_class: type[PreTrainedConfig]
    options: dict[str, Any]
    particular: str

    @property
    def architecture(self) -> str:
        """The name of its model class, in Transformers as in vLLM."""
        return f"{self.config_class.__name__.removesuffix('Config')}ForCausalLM"

    def config(self) -> PreTrainedConfig:
        """The configuration of the tiny checkpoint."""
        return self.config_class(**self.options)


def _kind(config_class: type[PreTrainedConfig], particular: str, **options: Any) -> TinyModel:
    return TinyModel(config_class, {**_SHAPE, "rope_parameters": _PLAIN_ROPE, **options}, particular)


TINY_MODELS = {
    "Llama": _kind(LlamaConfig, "grouped heads"),
    "Llama 3": _kind(LlamaConfig, "llama3 scaling", rope_parameters=_LLAMA3_ROPE),
    "Mistral": _kind(MistralConfig, "no sliding window", sliding_window=None, head_dim=64),
    "Qwen2": _kind(Qwen2Config, "biases, YaRN", rope_parameters=_YARN_ROPE),
    "Qwen3": _kind(Qwen3Config, "normalised queries and keys", head_dim=64),
    "Qwen3-MoE": _kind(Qwen3MoeConfig, "experts", head_dim=64, **_EXPERTS),
    "Phi-3": _kind(
        Phi3Config,
        "fused projections, half of a head turns",
        pad_token_id=2,
        rope_parameters={**_PLAIN_ROPE, "partial_rotary_factor": 0.5},
    ),
    "Granite": _kind(GraniteConfig, "multipliers", **_MULTIPLIERS),
    "GPT-J": TinyModel(
        GPTJConfig,
        {
            "vocab_size": _VOCABULARY,
            "n_embd": 128,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 2048,
            "rotary_dim": 16,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
        "half of a head turns, in interleaved pairs",
    ),
}
"""The kinds of models on which the engine is tested, by the name of their family."""


def make_tiny_model(kind: str, directory: Path, seed: int = 0) -> Path:
    """Write a float32 checkpoint of `kind` (a key of `TINY_MODELS`) with the embedded model's tokenizer.

    The weights are larger than an initialisation for training would be, so that attention depends on the keys
    and a wrong rotation shows in the output; biases and norms are drawn too. The same seed gives the same
    weights. Returns `directory`.
    """
    config = TINY_MODELS[kind].config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() >= 2:
                    weights.normal_(std=1.5 * weights.shape[-1] ** -0.5)
                else:
                    weights.add_(0.2 * torch.randn_like(weights))
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer = Path(resolve_model("smollm2-135m", progress=False))
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, directory / name)
    return directory


def make_tiny_adapter(directory: Path, seed: int) -> Path:
    """Write a LoRA adapter for the `Llama` of `make_tiny_model` that changes its queries, keys and values.

    Returns `directory`.
    """
    rank = 4
    shape = TINY_MODELS["Llama"].config().to_dict()
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
