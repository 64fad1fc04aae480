"""Which rotary embeddings can be re-encoded, and the rotation that moves keys from one position to another.

RoPE turns the i-th pair of a key's coordinates by the angle position * inv_freq[i]. A key stored for position
p becomes the key of position p + Δ by turning it further by Δ * inv_freq[i] (DARIC paper, position
re-encoding). This holds exactly when inv_freq does not depend on the position or on the length of the prompt.
A magnitude factor (YaRN) is already in the stored key, so the rotation by Δ has magnitude 1.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from daric_rag.engine.model_support import PLAIN_CACHE_DTYPES
from daric_rag.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class RopeParameters:
    """What must be known of a model's rotary embedding to rotate its keys; the same for all of its layers.

    `inv_freq` is float64 `[rotary_dim // 2]` in radians per token, with linear, Llama-3, NTK or YaRN scaling
    included. The first `rotary_dim` coordinates of a head of `head_dim` turn, the rest stay. `neox` pairs
    coordinate i with i + rotary_dim // 2, otherwise 2i goes with 2i + 1 (GPT-J). `magnitude` is the factor
    inside the stored keys; re-encoding never applies it.
    """

    inv_freq: np.ndarray[Any, np.dtype[np.float64]]
    rotary_dim: int
    head_dim: int
    neox: bool
    magnitude: float

    def agrees_with(self, other: "RopeParameters") -> bool:
        """Tell whether both encode the same positions into the same keys, bit for bit."""
        return self.fingerprint() == other.fingerprint()

    def fingerprint(self) -> str:
        """Return a hex digest of all parameters, for the root key of the index."""
        shape = f"{self.rotary_dim}/{self.head_dim}/{self.neox}/{self.magnitude!r}/"
        return hashlib.sha256(shape.encode() + self.inv_freq.astype("<f8").tobytes()).hexdigest()


def delta_table(params: RopeParameters, deltas: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of the rotation by each Δposition, both float32 `[len(deltas), rotary_dim // 2]`.

    Angles are computed in float64: a float32 angle of 30,000 radians is wrong in its third decimal. Δ may be
    negative.
    """
    steps = torch.tensor(deltas, dtype=torch.float64).reshape(-1, 1)
    angles = steps * torch.from_numpy(params.inv_freq).reshape(1, -1)
    return angles.cos().to(torch.float32), angles.sin().to(torch.float32)


def rotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, neox: bool, rotary_dim: int
) -> torch.Tensor:
    """Return the keys turned by the angles of `cos` and `sin`; the reference that the kernels are held to.

    `keys` is `[tokens, heads, head_dim]` of any floating dtype, `cos` and `sin` are
    `[tokens or 1, rotary_dim // 2]`. The arithmetic is float32 (or the keys' dtype if wider); the result has
    the dtype of the keys.
    """
    wide = torch.promote_types(keys.dtype, torch.float32)
    turning, still = keys[..., :rotary_dim].to(wide), keys[..., rotary_dim:]
    first, second = _split_pairs(turning, neox)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    turned = _join_pairs(first * cos - second * sin, second * cos + first * sin, neox)
    return torch.cat((turned.to(keys.dtype), still), dim=-1)


def _split_pairs(x: torch.Tensor, neox: bool) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if neox else (x[..., ::2], x[..., 1::2])


def _join_pairs(first: torch.Tensor, second: torch.Tensor, neox: bool) -> torch.Tensor:
    return torch.cat((first, second), dim=-1) if neox else torch.stack((first, second), dim=-1).flatten(-2)


def rope_parameters_from_model(model: torch.nn.Module) -> RopeParameters:
    """Read the rotary parameters of a loaded vLLM model and check them against the tables the model uses.

    Every layer with a KV cache must be plain causal attention with one rotary embedding of an allowed class
    beside it, and all layers must agree. Raises `UnsupportedModelError` naming the layer and the reason.
    """
    found: tuple[str, RopeParameters] | None = None
    for layer, rotary, head_dim in _attention_layers(model):
        params = _module_parameters(layer, rotary, head_dim)
        if found is None:
            found = (layer, params)
        elif not params.agrees_with(found[1]):
            raise UnsupportedModelError(
                f"KV reuse needs one rotary embedding for all layers, but {layer} differs from {found[0]}."
            )
    if found is None:
        raise UnsupportedModelError(
            "KV reuse needs attention layers with a KV cache, but this model has none."
        )
    return found[1]


def rope_parameters_from_module(rotary: torch.nn.Module, head_dim: int) -> RopeParameters:
    """Read and check the parameters of one vLLM rotary module used with heads of `head_dim`.

    Raises `UnsupportedModelError` if its class is not allowed or its table is not the expected rotation.
    """
    return _module_parameters("the rotary embedding", rotary, head_dim)


def _attention_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, int]]:
    """Yield (layer name, its rotary module, head_dim) of every layer that owns a KV cache."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    modules = dict(model.named_modules(remove_duplicate=False))
    seen: set[int] = set()
    for name, module in modules.items():
        # A module reachable by two names (a model's alias of its language tower) is one layer.
        if not isinstance(module, AttentionLayerBase) or id(module) in seen:
            continue
        seen.add(id(module))
        layer: Any = module
        _refuse_other_attention(name, layer)
        parent = modules[name.rpartition(".")[0]]
        rotaries = [child for child in parent.children() if _is_rotary(child)]
        if len(rotaries) != 1:
            raise UnsupportedModelError(
                f"KV reuse needs one vLLM rotary embedding beside each attention layer, but {name} has "
                f"{len(rotaries)} (learned positions, ALiBi, layers without RoPE and models run through the "
                "Transformers backend cannot be re-encoded)."
            )
        yield name, rotaries[0], int(layer.head_size)


def _is_rotary(module: torch.nn.Module) -> bool:
    """Recognise rotary embeddings of every kind, the ones that are then refused included."""
    name = type(module).__name__.lower()
    return "rotary" in name and "apply" not in name


def _refuse_other_attention(name: str, layer: Any) -> None:
    from vllm.model_executor.layers.attention import Attention

    reason = None
    # Subclasses are the chunked-local, cross, encoder-only, sink and prefix-LM variants.
    if type(layer) is not Attention:
        reason = f"is {type(layer).__name__}"
    elif layer.sliding_window is not None:
        reason = f"has a sliding window of {layer.sliding_window} tokens"
    elif layer.kv_sharing_target_layer_name is not None:
        reason = f"shares the KV cache of {layer.kv_sharing_target_layer_name}"
    elif layer.attn_type != "decoder":
        reason = f"has attention type {layer.attn_type!r}"
    elif layer.kv_cache_dtype not in PLAIN_CACHE_DTYPES:
        reason = f"keeps its KV in {layer.kv_cache_dtype}, and quantised keys cannot be rotated"
    elif layer.head_size_v != layer.head_size:
        reason = f"has value heads of {layer.head_size_v} beside key heads of {layer.head_size}"
    if reason is not None:
        raise UnsupportedModelError(f"KV reuse needs plain causal attention layers, but {name} {reason}.")


def _module_parameters(layer: str, rotary: torch.nn.Module, head_dim: int) -> RopeParameters:
    read = _allowed_classes().get(type(rotary))
    module: Any = rotary
    if read is None:
        raise UnsupportedModelError(
            f"KV reuse cannot re-encode the positions of {layer}: {type(rotary).__name__} is not one of the "
            "rotary embeddings known to be a plain rotation by fixed frequencies."
        )
    if module.head_size != head_dim or module.rotary_dim > head_dim or module.rotary_dim % 2:
        raise UnsupportedModelError(
            f"KV reuse cannot re-encode the positions of {layer}: its rotary embedding covers "
            f"{module.rotary_dim} of {module.head_size} coordinates, its key heads have {head_dim}."
        )
    # The class computed its frequencies on the device of its table; the same device gives the same bits.
    with torch.device(module.cos_sin_cache.device):
        inv_freq, magnitude = read(module, layer)
    params = RopeParameters(inv_freq, module.rotary_dim, head_dim, bool(module.is_neox_style), magnitude)
    _check_table(layer, params, module.cos_sin_cache)
    return params


_Float64Array = np.ndarray[Any, np.dtype[np.float64]]
_Reader = Callable[[Any, str], tuple[_Float64Array, float]]


def _allowed_classes() -> dict[type, _Reader]:
    """Map each allowed class to its (inv_freq, magnitude) reader; subclasses are left out on purpose."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    return {
        RotaryEmbedding: _read_plain,
        Llama3RotaryEmbedding: _read_plain,
        NTKScalingRotaryEmbedding: _read_plain,  # fixed NTK: one base for all positions
        LinearScalingRotaryEmbedding: _read_linear,
        YaRNScalingRotaryEmbedding: _read_yarn,
    }


def _float64(inv_freq: torch.Tensor) -> _Float64Array:
    # From the float32 values the model uses, not from the formula: their rounding grows with the position.
    return inv_freq.detach().to("cpu", torch.float64).numpy()


def _read_plain(module: Any, layer: str) -> tuple[_Float64Array, float]:
    return _float64(module._compute_inv_freq(module.base)), 1.0


def _read_linear(module: Any, layer: str) -> tuple[_Float64Array, float]:
    if len(module.scaling_factors) != 1:
        raise UnsupportedModelError(
            f"KV reuse cannot re-encode the positions of {layer}: linear scaling with several factors "
            f"{list(module.scaling_factors)} (one is allowed)."
        )
    return _float64(module._compute_inv_freq(module.base)) / float(module.scaling_factors[0]), 1.0


def _read_yarn(module: Any, layer: str) -> tuple[_Float64Array, float]:
    return _float64(module._compute_inv_freq(module.scaling_factor)), float(module.mscale)


def _check_table(layer: str, params: RopeParameters, table: torch.Tensor) -> None:
    """Compare the model's cos/sin table with the parameters at several positions, magnitude included.

    The allowed difference is one rounding to the table's dtype plus what float32 angles lose far out.
    """
    last = table.shape[0] - 1
    positions = sorted({p for p in (0, 1, 2, 7, 100, 1000, last // 3, last // 2, last) if p <= last})
    actual = table[torch.tensor(positions, device=table.device)].to("cpu", torch.float64)
    angles = torch.tensor(positions, dtype=torch.float64).reshape(-1, 1) * torch.from_numpy(params.inv_freq)
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * params.magnitude
    rounding = torch.finfo(table.dtype).eps + 4 * torch.finfo(torch.float32).eps * (1 + angles)
    allowed = torch.cat((rounding, rounding), dim=-1) * max(params.magnitude, 1.0)
    if actual.shape != expected.shape or not bool(((actual - expected).abs() <= allowed).all()):
        raise UnsupportedModelError(
            f"KV reuse cannot re-encode the positions of {layer}: its cos/sin table is not the rotation that "
            "its class and parameters describe."
        )
