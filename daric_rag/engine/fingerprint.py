"""What makes stored KV incompatible: the fields of a root key (DESIGN: index and storage)."""

from __future__ import annotations

import os
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine.keys import model_fingerprint

# Raised whenever the meaning of stored bytes changes.
LAYOUT_VERSION = 1


def storage_dtype(vllm_config: Any, config: DaricConfig) -> str:
    """The dtype in which KV is kept: the configured one, or the engine's own for `auto`."""
    engine_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return engine_dtype if config.storage_dtype == "auto" else config.storage_dtype


def root_fields(vllm_config: Any, config: DaricConfig) -> dict[str, Any]:
    """The fields of the root key that all requests of an engine share; namespace and adapter come on top."""
    model = vllm_config.model_config
    text_config = model.hf_text_config
    return {
        "layout_version": LAYOUT_VERSION,
        "weights": weights_fingerprint(model.model, model.revision),
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "storage_dtype": storage_dtype(vllm_config, config),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "rope": _rope_fields(text_config),
        # KV of a chunk depends on what it was generated behind: nothing, today.
        "generated_behind": None,
    }


def weights_fingerprint(model: str, revision: str | None) -> str:
    """Fingerprint of a model's files: a local directory, or the snapshot of a hub id in the local hub cache."""
    if os.path.exists(model):
        return model_fingerprint(model)
    from huggingface_hub import snapshot_download

    return model_fingerprint(snapshot_download(model, revision=revision, local_files_only=True))


def adapter_fingerprint(name: str, path: str) -> str:
    """Fingerprint of a LoRA adapter: its files where they can be read here, else what it is called."""
    try:
        weights = model_fingerprint(path)
    except (OSError, ValueError):  # a hub id; or no adapter at all, which is for vLLM to say
        weights = path
    return f"{name}:{weights}"


def _rope_fields(text_config: Any) -> Any:
    names = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
    values = {name: getattr(text_config, name, None) for name in names}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
