"""Re-encoding against recomputing with vLLM's own rotary modules, and what is refused."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from daric_rag.engine.worker.rope import (
    RopeParameters,
    delta_table,
    rope_parameters_from_model,
    rope_parameters_from_module,
    rotate,
)
from daric_rag.errors import UnsupportedModelError

HEAD_DIM = 64
HEADS = 2
TOKENS = 256
YARN_MAGNITUDE = 0.1 * np.log(4.0) + 1.0

DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "ntk": {"rope_type": "ntk", "rope_theta": 10_000.0, "factor": 4.0},
    "partial rotary": {**DEFAULT, "partial_rotary_factor": 0.25},
    "partial rotary with yarn": {**YARN, "partial_rotary_factor": 0.5},
}


@pytest.fixture(scope="module", autouse=True)
def vllm_context() -> Iterator[None]:
    """vLLM's modules read the current configuration when they are built."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def build(
    parameters: dict[str, Any],
    neox: bool = True,
    max_position: int = 8192,
    dtype: torch.dtype = torch.float32,
) -> Any:
    from vllm.model_executor.layers import rotary_embedding

    # get_rope hands out shared modules; a test that changes one must not reach the next test.
    rotary_embedding._ROPE_DICT.clear()
    return rotary_embedding.get_rope(HEAD_DIM, max_position, neox, dict(parameters), dtype=dtype)


def encode(rotary: Any, positions: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Let vLLM rotate raw keys `[tokens, heads, head_dim]` at the given positions."""
    flat = raw.reshape(raw.shape[0], -1)
    _, keys = rotary.forward_native(positions, flat.clone(), flat.clone())
    return keys.view(raw.shape)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the error of all keys together, relative to the length of the keys."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def draw(last: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw keys, the positions they are stored at (inside a chunk) and the positions they are wanted at."""
    generator = torch.Generator().manual_seed(last)
    raw = torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator)
    stored = torch.randint(0, 512, (TOKENS,), generator=generator)
    wanted = torch.randint(0, last, (TOKENS,), generator=generator)
    wanted[0] = last - 1
    return raw, stored, wanted


def reencode(rotary: Any, raw: torch.Tensor, stored: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    params = rope_parameters_from_module(rotary, HEAD_DIM)
    cos, sin = delta_table(params, (wanted - stored).tolist())
    return rotate(encode(rotary, stored, raw), cos, sin, params.neox, params.rotary_dim)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("name", SCALINGS)
# The model's float32 table knows the angle p * inv_freq only to half a unit in its last place, 1e-3 rad near
# p = 32k. The bound at 32k is that of the table: the next test shows that the rotation itself adds nothing.
@pytest.mark.parametrize(("last", "bound"), [(8192, 1e-4), (32_768, 3e-4)])
def test_reencoded_keys_equal_recomputed_keys(name: str, neox: bool, last: int, bound: float) -> None:
    rotary = build(SCALINGS[name], neox, max_position=last)
    raw, stored, wanted = draw(last)
    recomputed = encode(rotary, wanted, raw)
    assert relative_error(reencode(rotary, raw, stored, wanted), recomputed) <= bound
    # The bound means something: keys left where they were are far off.
    assert relative_error(encode(rotary, stored, raw), recomputed) > 0.3


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_is_exact_at_any_distance(name: str, neox: bool) -> None:
    """Against float64 angles, where no table rounds, the error does not grow with Δ."""
    params = rope_parameters_from_module(build(SCALINGS[name], neox), HEAD_DIM)
    raw, stored, wanted = draw(131_072)
    wide = raw.double()

    def turn(positions: torch.Tensor) -> torch.Tensor:
        angles = positions.double().reshape(-1, 1) * torch.from_numpy(params.inv_freq)
        return rotate(wide, angles.cos(), angles.sin(), neox, params.rotary_dim)

    cos, sin = delta_table(params, (wanted - stored).tolist())
    moved = rotate(turn(stored).float(), cos, sin, neox, params.rotary_dim)
    assert relative_error(moved, turn(wanted)) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tables_are_accepted_and_reencoded(dtype: torch.dtype) -> None:
    rotary = build(YARN, dtype=dtype)
    raw, stored, wanted = draw(8192)
    moved = reencode(rotary, raw.to(dtype), stored, wanted)
    assert moved.dtype == dtype
    # Rounded four times on the way: two tables, the stored key, the moved key.
    recomputed = encode(rotary, wanted, raw.to(dtype))
    assert relative_error(moved, recomputed) <= 4 * torch.finfo(dtype).eps


def test_yarn_magnitude_stays_in_the_key_and_out_of_the_rotation() -> None:
    rotary = build(YARN)
    params = rope_parameters_from_module(rotary, HEAD_DIM)
    assert params.magnitude == pytest.approx(YARN_MAGNITUDE)
    raw, stored, wanted = draw(8192)
    moved = reencode(rotary, raw, stored, wanted)
    torch.testing.assert_close(moved.norm(dim=-1), YARN_MAGNITUDE * raw.norm(dim=-1), rtol=1e-5, atol=0.0)
    cos, sin = delta_table(params, [0, 1, 5000])
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), rtol=1e-6, atol=0.0)


def test_partial_rotary_leaves_the_other_coordinates_alone() -> None:
    rotary = build(SCALINGS["partial rotary"])
    raw, stored, wanted = draw(8192)
    moved = reencode(rotary, raw, stored, wanted)
    assert torch.equal(moved[..., 16:], raw[..., 16:])
    assert not torch.equal(moved[..., :16], raw[..., :16])


def test_delta_table_shapes_and_identity() -> None:
    params = rope_parameters_from_module(build(DEFAULT), HEAD_DIM)
    cos, sin = delta_table(params, [0, -7, 7])
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (3, HEAD_DIM // 2)
    assert torch.equal(cos[0], torch.ones(HEAD_DIM // 2)) and torch.equal(sin[0], torch.zeros(HEAD_DIM // 2))
    assert torch.equal(cos[1], cos[2]) and torch.equal(sin[1], -sin[2])
    assert delta_table(params, [])[0].shape == (0, HEAD_DIM // 2)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_one_row_turns_all_tokens_and_back(neox: bool) -> None:
    params = rope_parameters_from_module(build(DEFAULT, neox), HEAD_DIM)
    keys = draw(8192)[0]
    there = rotate(keys, *delta_table(params, [4321]), neox, params.rotary_dim)
    back = rotate(there, *delta_table(params, [-4321]), neox, params.rotary_dim)
    torch.testing.assert_close(back, keys, rtol=1e-5, atol=1e-6)


def test_fingerprint_tells_parameters_apart() -> None:
    modules = [build(parameters, neox) for parameters in SCALINGS.values() for neox in (True, False)]
    prints = {rope_parameters_from_module(module, HEAD_DIM).fingerprint() for module in modules}
    assert len(prints) == len(modules)
    again = rope_parameters_from_module(build(DEFAULT), HEAD_DIM)
    assert again.agrees_with(rope_parameters_from_module(build(DEFAULT), HEAD_DIM))


def test_a_subclass_is_not_trusted() -> None:
    rotary = build({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0})
    with pytest.raises(UnsupportedModelError, match="DynamicNTKScalingRotaryEmbedding"):
        rope_parameters_from_module(rotary, HEAD_DIM)


@pytest.mark.parametrize("damage", ["frequency", "magnitude", "style of one position"])
def test_a_table_that_is_another_rotation_is_refused(damage: str) -> None:
    rotary = build(DEFAULT)
    table = rotary.cos_sin_cache
    if damage == "frequency":
        table.copy_(build({**DEFAULT, "rope_theta": 10_001.0}).cos_sin_cache)
    elif damage == "magnitude":
        table.mul_(1.001)
    else:
        table[-1] = table[-2]
    with pytest.raises(UnsupportedModelError, match="cos/sin table"):
        rope_parameters_from_module(rotary, HEAD_DIM)


def test_heads_of_another_size_are_refused() -> None:
    """MLA run as plain attention rotates the tail of a longer head."""
    with pytest.raises(UnsupportedModelError, match="64 of 64 coordinates, its key heads have 192"):
        rope_parameters_from_module(build(DEFAULT), 192)


def attention(**changes: Any) -> nn.Module:
    """A vLLM attention layer as the inspection sees it, without the weights and buffers of a real one."""
    from vllm.model_executor.layers.attention import Attention

    layer = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    facts = {
        "head_size": HEAD_DIM,
        "head_size_v": HEAD_DIM,
        "sliding_window": None,
        "kv_sharing_target_layer_name": None,
        "attn_type": "decoder",
        "kv_cache_dtype": "auto",
    }
    for name, value in {**facts, **changes}.items():
        setattr(layer, name, value)
    return layer


def model_of(*layers: tuple[Any, nn.Module]) -> nn.Module:
    """A model of (rotary module or None, attention layer) pairs, one a decoder layer."""
    model = nn.Module()
    model.layers = nn.ModuleList()
    for rotary, attn in layers:
        block = nn.Module()
        if rotary is not None:
            block.rotary_emb = rotary
        block.attn = attn
        model.layers.append(block)
    return model


def test_model_with_a_shared_rotary_module() -> None:
    rotary = build(LLAMA3, neox=False)
    params = rope_parameters_from_model(model_of((rotary, attention()), (rotary, attention())))
    assert (params.rotary_dim, params.head_dim, params.neox) == (HEAD_DIM, HEAD_DIM, False)
    assert isinstance(params, RopeParameters) and params.inv_freq.dtype == np.float64


def test_model_whose_layers_differ_is_refused() -> None:
    local, wide = build(DEFAULT), build({**DEFAULT, "rope_theta": 1e6})
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.attn differs from layers\.0\.attn"):
        rope_parameters_from_model(model_of((local, attention()), (wide, attention())))


def test_layer_without_rope_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.attn has 0"):
        rope_parameters_from_model(model_of((build(DEFAULT), attention()), (None, attention())))


def test_model_without_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="has none"):
        rope_parameters_from_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sliding_window": 4096}, "sliding window of 4096"),
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, r"shares the KV cache of layers\.0\.attn"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"head_size_v": 128}, "value heads of 128"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
    ],
)
def test_other_attention_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        rope_parameters_from_model(model_of((build(DEFAULT), attention(**changes))))


def test_attention_subclass_is_refused() -> None:
    from vllm.model_executor.layers.attention import ChunkedLocalAttention

    layer = ChunkedLocalAttention.__new__(ChunkedLocalAttention)
    nn.Module.__init__(layer)
    with pytest.raises(UnsupportedModelError, match="ChunkedLocalAttention"):
        rope_parameters_from_model(model_of((build(DEFAULT), layer)))


def test_vision_tower_rotaries_are_ignored() -> None:
    """Only rotary modules beside a layer with a KV cache count; a vision encoder has neither."""
    model = model_of((build(DEFAULT), attention()))
    model.vision = nn.Module()
    model.vision.rotary_emb = build({**DEFAULT, "partial_rotary_factor": 0.5})
    assert rope_parameters_from_model(model).rotary_dim == HEAD_DIM
