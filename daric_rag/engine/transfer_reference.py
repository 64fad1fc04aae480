"""Pure-torch transfer: what the compiled kernels must equal, and what runs where they were not built."""

from __future__ import annotations

import ctypes

import torch

from daric_rag.engine.kv_layout import KVLayout, PackedOrder
from daric_rag.engine.transfer_plan import NO_ROTATION, RopeTable, TransferPlan, TransferRange


def scatter_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Write one layer of the records into the blocks, keys rotated by each range's row of `rope`."""
    for item in _ranges(plan):
        keys, values = _record_rows(plan, layout, item, layer)
        keys, values = keys.to(cache.device, torch.float32), values.to(cache.device)
        if item.rope_row != NO_ROTATION:
            keys = rotate_rows(keys, rope, item.rope_row)
        _write(cache, layout, plan, item, keys.to(cache.dtype), is_key=True)
        _write(cache, layout, plan, item, values.to(cache.dtype), is_key=False)


def gather_(cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int) -> None:
    """Read one layer of the blocks into the records, without rotation."""
    for item in _ranges(plan):
        keys, values = _record_rows(plan, layout, item, layer)
        keys.copy_(_read(cache, layout, plan, item, is_key=True))
        values.copy_(_read(cache, layout, plan, item, is_key=False))


def rotate_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Rotate the keys that the ranges cover where they are."""
    del layer
    for item in _ranges(plan):
        if item.rope_row == NO_ROTATION:
            continue
        keys = _read(cache, layout, plan, item, is_key=True).to(torch.float32)
        _write(cache, layout, plan, item, rotate_rows(keys, rope, item.rope_row).to(cache.dtype), is_key=True)


def rotate_rows(keys: torch.Tensor, rope: RopeTable | None, row: int) -> torch.Tensor:
    """R(Δ) k for float32 `keys` [..., head_dim] with row `row` of `rope`; a new tensor."""
    if rope is None:
        raise ValueError(f"rope is None, but a range asks for its row {row}")
    all_cos, all_sin = rope.on(keys.device)
    cos, sin = all_cos[row], all_sin[row]
    rotated = keys.clone()
    turned = rotated[..., : rope.rotary_dim]
    if rope.neox:
        x, y = turned.chunk(2, dim=-1)
    else:
        x, y = turned[..., 0::2], turned[..., 1::2]
    new_x, new_y = x * cos - y * sin, y * cos + x * sin
    x.copy_(new_x)
    y.copy_(new_y)
    return rotated


def _ranges(plan: TransferPlan) -> list[TransferRange]:
    return [TransferRange(*row) for row in plan.ranges.tolist()]


def _record_rows(
    plan: TransferPlan, layout: KVLayout, item: TransferRange, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value rows of the range in its record: two views [num_tokens, num_kv_heads, head_dim]."""
    shape = (2, item.record_tokens, layout.num_kv_heads, layout.head_dim)
    layer_bytes = 2 * item.record_tokens * layout.num_kv_heads * layout.head_dim * plan.storage_dtype.itemsize
    memory = (ctypes.c_char * layer_bytes).from_address(item.record_address + layer * layer_bytes)
    rows = torch.frombuffer(memory, dtype=plan.storage_dtype).view(shape)
    rows = rows[:, item.src_token_start : item.src_token_start + item.num_tokens]
    return rows[0], rows[1]


def _write(
    cache: torch.Tensor,
    layout: KVLayout,
    plan: TransferPlan,
    item: TransferRange,
    rows: torch.Tensor,
    is_key: bool,
) -> None:
    pattern = layout.key_pattern if is_key else layout.value_pattern
    blocks, tokens = _slots(cache, layout, plan, item)
    if pattern is None:
        flat, index = _flat_index(cache, layout, blocks, tokens, is_key)
        flat.index_put_((index.reshape(-1),), rows.reshape(-1))
    else:
        view = _token_view(cache, layout, pattern, is_key)
        view[blocks, tokens // pattern.tile, tokens % pattern.tile] = rows.view(
            len(rows), layout.num_kv_heads, layout.head_dim // pattern.pair, pattern.pair
        )


def _read(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, item: TransferRange, is_key: bool
) -> torch.Tensor:
    """Rows [num_tokens, num_kv_heads, head_dim] of the range, copied out of the blocks."""
    pattern = layout.key_pattern if is_key else layout.value_pattern
    blocks, tokens = _slots(cache, layout, plan, item)
    if pattern is None:
        flat, index = _flat_index(cache, layout, blocks, tokens, is_key)
        return flat[index]
    view = _token_view(cache, layout, pattern, is_key)
    rows = view[blocks, tokens // pattern.tile, tokens % pattern.tile]
    return rows.reshape(item.num_tokens, layout.num_kv_heads, layout.head_dim)


def _slots(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, item: TransferRange
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block id and token within the block, int64 [num_tokens] each, for every token of the range."""
    _, block_tables = plan.on(cache.device)
    position = torch.arange(item.dst_token_start, item.dst_token_start + item.num_tokens, device=cache.device)
    blocks = block_tables[item.block_table_offset + position // layout.block_size]
    return blocks, position % layout.block_size


def _token_view(cache: torch.Tensor, layout: KVLayout, pattern: PackedOrder, is_key: bool) -> torch.Tensor:
    """The K or V area as [num_blocks, tiles, tile, num_kv_heads, head_dim / pair, pair]: tokens first."""
    sizes = (
        cache.shape[0],
        layout.block_size // pattern.tile,
        pattern.tile,
        layout.num_kv_heads,
        layout.head_dim // pattern.pair,
        pattern.pair,
    )
    strides = (
        cache.stride(0),
        pattern.tile_stride,
        pattern.pair,
        cache.stride(1),
        pattern.tile * pattern.pair,
        1,
    )
    start = cache.storage_offset() + (0 if is_key else layout.value_offset)
    return cache.as_strided(sizes, strides, start)


def _flat_index(
    cache: torch.Tensor, layout: KVLayout, blocks: torch.Tensor, tokens: torch.Tensor, is_key: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache as one flat tensor, and the [num_tokens, num_kv_heads, head_dim] indexes of the range."""
    order = layout.orders_on(cache.device)[0 if is_key else 1].view(layout.block_size, layout.head_dim).long()
    heads = torch.arange(layout.num_kv_heads, device=cache.device) * cache.stride(1)
    index = (blocks * cache.stride(0))[:, None, None] + heads[None, :, None] + order[tokens][:, None, :]
    size = 1 + sum((length - 1) * stride for length, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((size,), (1,), cache.storage_offset()), index + (
        0 if is_key else layout.value_offset
    )
