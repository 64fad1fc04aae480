"""What makes stored KV incompatible: the fields of a root key (DESIGN: index and storage)."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine.keys import model_fingerprint

# Raised whenever the meaning of stored bytes changes.
LAYOUT_VERSION = 2

# Where a checkpoint lies and which library read it, not what it is.
_UNRELATED_CONFIG = frozenset({"_name_or_path", "transformers_version"})


def storage_dtype(vllm_config: Any, config: DaricConfig) -> str:
    """The dtype in which KV is kept: the configured one, or the engine's own for `auto`."""
    engine_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    return engine_dtype if config.storage_dtype == "auto" else config.storage_dtype


def root_fields(vllm_config: Any, config: DaricConfig) -> dict[str, Any]:
    """The fields of the root key that all requests of an engine share; namespace, adapter and profile come on top.

    The model's configuration is in it as a whole, with the caller's `hf_overrides`: rotary embedding, soft caps,
    multipliers, number of layers and what the next architecture brings.

    Raises `ValueError` if there is nothing that tells this model's weights from others'.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    return {
        "layout_version": LAYOUT_VERSION,
        "weights": (
            _dummy_weights(vllm_config)
            if load.load_format == "dummy"
            else weights_fingerprint(model.model, model.revision, load.download_dir)
        ),
        "model_config": {
            name: value
            for name, value in _plain(model.hf_config.to_dict()).items()
            if name not in _UNRELATED_CONFIG
        },
        "model_class_overrides": _plain(model.model_class_overrides),
        "quantization": [_plain(model.quantization), _plain(model.quantization_config)],
        "dtype": str(model.dtype),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "storage_dtype": storage_dtype(vllm_config, config),
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
    }


def weights_fingerprint(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Fingerprint of a model's or an adapter's weights: a local path, or a hub id that vLLM has downloaded.

    `download_dir`: vLLM's option, the hub cache if it is not the usual one. Raises `ValueError` if there are no
    weights.
    """
    if os.path.exists(model):
        return model_fingerprint(model)
    from huggingface_hub import snapshot_download

    try:
        # Only the files that vLLM needs were downloaded, so nothing is asked of the snapshot but to be there.
        snapshot = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True, ignore_patterns="*"
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{model!r} is no local path and not in the hub cache ({download_dir or 'the default one'}), so its KV "
            f"cannot be told from other models'; pass the path of its directory: {error}"
        ) from None
    return model_fingerprint(snapshot)


def adapter_fingerprint(name: str, path: str) -> str:
    """Fingerprint of a LoRA adapter: its name and its files, found as vLLM finds them.

    Raises `ValueError` if it has none: what cannot be identified must not be reused.
    """
    return f"{name}:{weights_fingerprint(os.path.expanduser(path))}"


def _dummy_weights(vllm_config: Any) -> str:
    """vLLM's `load_format="dummy"`: random numbers that depend on the shapes, its version and the device."""
    from vllm import __version__

    return f"dummy: vLLM {__version__}, {vllm_config.device_config.device_type}"


def _plain(value: Any) -> Any:
    """The value in JSON's types; what has none is written out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
