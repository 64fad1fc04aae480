"""Where one token's key and value lie inside a paged KV block of the backend.

Both backends register one tensor a layer, seen as `[num_blocks, num_kv_heads, block_size, 2 * head_dim]`
(vLLM 0.32). What differs is the inside of one (block, head):

- CPU: the tensor is contiguous; the first half of a (block, head) area is K, packed in an order that depends
  on the instruction set, the second half is V. The order is learnt by asking vLLM's own cache-writing op.
- GPU: any strides (NHD, HND, block-major); a token's K is followed by its V in the last dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from daric_rag.errors import UnsupportedModelError

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# bfloat16 holds integers up to 256 exactly, so indexes are coded in digits below this base.
_DIGIT_BASE = 128


@dataclass(frozen=True)
class PackedOrder:
    """The family of orders that real kernels use, for element (token t, dim d) of one (block, head) area.

    offset = (t // tile) * tile_stride + (d // pair) * tile * pair + (t % tile) * pair + d % pair

    `tile == 1` is plain rows, `pair == 1` a tile transposition, `pair == 2` the VNNI order of 16-bit kernels.
    """

    tile: int
    pair: int
    tile_stride: int

    def offsets(self, block_size: int, head_dim: int) -> torch.Tensor:
        """The order written out: int32 [block_size * head_dim]."""
        token = torch.arange(block_size)[:, None]
        dim = torch.arange(head_dim)[None, :]
        raw = (
            (token // self.tile) * self.tile_stride
            + (dim // self.pair) * (self.tile * self.pair)
            + (token % self.tile) * self.pair
            + dim % self.pair
        )
        return raw.to(torch.int32).reshape(-1)


@dataclass(frozen=True, eq=False)
class KVLayout:
    """How the blocks of one attention group are laid out; the same for all of its layers.

    `key_order` and `value_order`: int32 [block_size * head_dim], the offset in elements of (token, dim) from
    the start of the K (V) area of one (block, head). The V area starts `value_offset` elements after the K
    area. `key_pattern` and `value_pattern` are their structure, None for an order outside the known family.
    """

    kind: Literal["packed_cpu", "strided"]
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    key_order: torch.Tensor
    value_order: torch.Tensor
    value_offset: int
    key_pattern: PackedOrder | None = field(init=False)
    value_pattern: PackedOrder | None = field(init=False)

    def __post_init__(self) -> None:
        for name, order in (("key_pattern", self.key_order), ("value_pattern", self.value_order)):
            object.__setattr__(self, name, recognise_order(order, self.block_size, self.head_dim))

    @cached_property
    def token_stride(self) -> int:
        """What `stride(2)` of a cache of this layout must be."""
        if self.kind == "packed_cpu" or self.key_pattern is None:
            return 2 * self.head_dim
        return self.key_pattern.tile_stride

    def check_cache(self, cache: torch.Tensor) -> None:
        """Raise ValueError unless `cache` is a KV cache of this layout."""
        expected = (self.num_kv_heads, self.block_size, 2 * self.head_dim)
        if cache.dim() != 4 or tuple(cache.shape[1:]) != expected:
            raise ValueError(
                f"cache has shape {tuple(cache.shape)}, expected [num_blocks, {str(expected)[1:-1]}]"
            )
        if cache.dtype != self.dtype:
            raise ValueError(f"cache has dtype {cache.dtype}, the layout was made for {self.dtype}")
        strides_fit = cache.stride(3) == 1 and (self.block_size == 1 or cache.stride(2) == self.token_stride)
        if not strides_fit:
            raise ValueError(
                f"cache has strides {cache.stride()}, the layout needs [*, *, {self.token_stride}, 1]"
            )


@dataclass(frozen=True, eq=False)
class KVCaches:
    """vLLM's KV cache tensors, one a layer, checked to be of one layout, size and device."""

    layers: tuple[torch.Tensor, ...]
    layout: KVLayout

    def __post_init__(self) -> None:
        for number, cache in enumerate(self.layers):
            self.layout.check_cache(cache)
            if cache.shape[0] != self.num_blocks or cache.device != self.device:
                raise ValueError(
                    f"the KV cache of layer {number} has {cache.shape[0]} blocks on {cache.device}, that of "
                    f"layer 0 {self.num_blocks} on {self.device}"
                )

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> KVCaches:
        """Learn the layout from the first layer; raises what `learn_cpu_layout` and `gpu_layout` raise."""
        first = layers[0]
        if first.device.type != "cpu":
            return cls(tuple(layers), gpu_layout(first))
        _, num_kv_heads, block_size, width = first.shape
        return cls(tuple(layers), learn_cpu_layout(num_kv_heads, width // 2, block_size, first.dtype))

    @property
    def num_blocks(self) -> int:
        """Blocks of every layer."""
        return self.layers[0].shape[0]

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.layers[0].device


def recognise_order(order: torch.Tensor, block_size: int, head_dim: int) -> PackedOrder | None:
    """Find the `PackedOrder` that `order` is, or None."""
    for pair in (1, 2, 4):
        if head_dim % pair:
            continue
        for tile in _divisors(block_size):
            if tile == 1 and pair > 1:
                continue
            stride = int(order[tile * head_dim]) if tile < block_size else tile * head_dim
            candidate = PackedOrder(tile, pair, stride)
            if torch.equal(candidate.offsets(block_size, head_dim), order):
                return candidate
    return None


def learn_cpu_layout(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> KVLayout:
    """Learn the block layout of vLLM's CPU attention by writing index-coded values through its own op.

    Raises ValueError for a size or dtype that cannot be a KV cache, UnsupportedModelError where vLLM has no
    CPU kernel for it or the op does not store a plain permutation (a quantised cache, for example).
    """
    _check_sizes(num_kv_heads, head_dim, block_size, dtype)
    key_order, value_order = _learn_orders(head_dim, block_size, dtype)
    return KVLayout(
        kind="packed_cpu",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        key_order=key_order,
        value_order=value_order,
        value_offset=block_size * head_dim,
    )


def gpu_layout(cache: torch.Tensor) -> KVLayout:
    """Derive the layout of a `[num_blocks, num_kv_heads, block_size, 2 * head_dim]` cache from its strides.

    NHD, HND and block-major allocations differ in strides only. Raises ValueError if the last dimension is
    not contiguous, its size is odd, or the dtype is not float32, float16 or bfloat16.
    """
    if cache.dim() != 4 or cache.shape[3] % 2 or cache.stride(3) != 1:
        raise ValueError(
            f"cache has shape {tuple(cache.shape)} and strides {cache.stride()}; "
            "expected [num_blocks, num_kv_heads, block_size, 2 * head_dim] with a contiguous last dimension"
        )
    _, num_kv_heads, block_size, width = cache.shape
    head_dim = width // 2
    _check_sizes(num_kv_heads, head_dim, block_size, cache.dtype)
    token_stride = cache.stride(2) if block_size > 1 else width
    order = PackedOrder(tile=1, pair=1, tile_stride=token_stride).offsets(block_size, head_dim)
    return KVLayout(
        kind="strided",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=cache.dtype,
        key_order=order,
        value_order=order,
        value_offset=head_dim,
    )


def _learn_orders(head_dim: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value order of one (block, head): int32 [block_size * head_dim] each."""
    size = block_size * head_dim
    index = torch.arange(size)
    key_raw = torch.zeros(size, dtype=torch.int64)
    value_raw = torch.zeros(size, dtype=torch.int64)
    place = 1
    while place < size:
        digit = (index // place) % _DIGIT_BASE
        key_area, value_area = _write_through_vllm(digit.view(block_size, 1, head_dim).to(dtype))
        key_raw += key_area.to(torch.int64) * place
        value_raw += value_area.to(torch.int64) * place
        place *= _DIGIT_BASE
    return _invert(key_raw, "key"), _invert(value_raw, "value")


def _write_through_vllm(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write `rows` [block_size, 1, head_dim] as keys and values of one block; return both raw areas, flat."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    block_size, _, head_dim = rows.shape
    isa = _get_attn_isa(rows.dtype, block_size, head_dim, "auto")
    block = torch.full((1, 1, 2 * block_size, head_dim), -1, dtype=rows.dtype)
    key_cache, value_cache = block.chunk(2, dim=2)
    try:
        ops.cpu_attn_reshape_and_cache(
            rows, rows.clone(), key_cache, value_cache, torch.arange(block_size), isa
        )
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"vLLM's CPU attention cannot store head_dim {head_dim}, block_size {block_size}, "
            f"{rows.dtype}: {error}"
        ) from error
    return key_cache.reshape(-1), value_cache.reshape(-1)


def _invert(raw: torch.Tensor, name: str) -> torch.Tensor:
    """Turn `raw[offset] = index` into `order[index] = offset`, refusing anything but a permutation."""
    offsets = torch.arange(raw.numel())
    if not torch.equal(raw.sort().values, offsets):
        raise UnsupportedModelError(f"vLLM's CPU attention does not store the {name} cache as a permutation")
    order = torch.empty(raw.numel(), dtype=torch.int32)
    order[raw] = offsets.to(torch.int32)
    return order


def _check_sizes(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    for name, value in (("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("block_size", block_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype is {dtype}, must be one of {', '.join(str(d) for d in SUPPORTED_DTYPES)}")


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
