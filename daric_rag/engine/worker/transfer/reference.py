"""Pure-torch transfer: what the compiled kernels must equal, and what runs where they were not built.

The functions take the arguments of the `daric_rag::*_kv` ops (transfer.py), with `ranges` in host memory and
all else on the cache's device; `device_ranges` is for the kernels only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from daric_rag.engine.worker.transfer.plan import NO_ROTATION, TransferRange


def scatter_kv(
    cache: torch.Tensor,
    ranges: torch.Tensor,
    device_ranges: torch.Tensor,
    pieces: torch.Tensor,
    key_order: torch.Tensor,
    value_order: torch.Tensor,
    key_pattern: Sequence[int],
    value_pattern: Sequence[int],
    value_offset: int,
    storage_dtype: torch.dtype,
    layer: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    neox: bool,
) -> None:
    """Write one layer of the records into the blocks, keys rotated by each range's row of `cos` and `sin`."""
    if len(ranges) == 0:
        return
    rows = [_record_rows(cache, item, storage_dtype, layer) for item in _items(ranges)]
    values = torch.cat([value for _, value in rows]).to(cache.device).to(cache.dtype)
    keys = torch.cat([key for key, _ in rows]).to(cache.device)
    keys = _rotate_ranges(keys.float(), ranges, cos, sin, neox).to(cache.dtype)
    slots = _Slots.of(cache, pieces)
    _Area(cache, key_order, key_pattern, 0).write(slots, keys)
    _Area(cache, value_order, value_pattern, value_offset).write(slots, values)


def gather_kv(
    cache: torch.Tensor,
    ranges: torch.Tensor,
    device_ranges: torch.Tensor,
    pieces: torch.Tensor,
    key_order: torch.Tensor,
    value_order: torch.Tensor,
    key_pattern: Sequence[int],
    value_pattern: Sequence[int],
    value_offset: int,
    storage_dtype: torch.dtype,
    layer: int,
) -> None:
    """Read one layer of the blocks into the records, without rotation."""
    slots = _Slots.of(cache, pieces)
    all_keys = _Area(cache, key_order, key_pattern, 0).read(slots)
    all_values = _Area(cache, value_order, value_pattern, value_offset).read(slots)
    start = 0
    for item in _items(ranges):
        keys, values = _record_rows(cache, item, storage_dtype, layer)
        end = start + item.num_tokens
        keys.copy_(all_keys[start:end])
        values.copy_(all_values[start:end])
        start = end


def rotate_kv(
    cache: torch.Tensor,
    ranges: torch.Tensor,
    device_ranges: torch.Tensor,
    pieces: torch.Tensor,
    key_order: torch.Tensor,
    key_pattern: Sequence[int],
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    neox: bool,
) -> None:
    """Rotate the keys that the ranges cover where they are."""
    slots, area = _Slots.of(cache, pieces), _Area(cache, key_order, key_pattern, 0)
    keys = _rotate_ranges(area.read(slots).float(), ranges, cos, sin, neox)
    area.write(slots, keys.to(cache.dtype))


@dataclass(frozen=True)
class _Slots:
    """Block ids and tokens within the block, int64 [num_tokens] each, of all tokens of a plan in order."""

    blocks: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, cache: torch.Tensor, pieces: torch.Tensor) -> _Slots:
        pieces = pieces.to(cache.device)
        _, block, begin, end, _ = pieces.unbind(1)
        lengths = end - begin
        starts = lengths.cumsum(0) - lengths
        inside = torch.arange(int(lengths.sum()), device=cache.device) - starts.repeat_interleave(lengths)
        return cls(block.repeat_interleave(lengths), begin.repeat_interleave(lengths) + inside)


@dataclass(frozen=True)
class _Area:
    """The K or the V areas of a layer; `pattern` holds the fields of a PackedOrder, or nothing."""

    cache: torch.Tensor
    order: torch.Tensor
    pattern: Sequence[int]
    offset: int

    def write(self, slots: _Slots, rows: torch.Tensor) -> None:
        """Write `rows` [num_tokens, num_kv_heads, head_dim], already in the cache's dtype."""
        if not self.pattern:
            flat, index = self._flat_index(slots)
            flat.index_put_((index.reshape(-1),), rows.reshape(-1))
            return
        tile, pair, _ = self.pattern
        rows = rows.view(*rows.shape[:2], rows.shape[2] // pair, pair)
        self._token_view()[slots.blocks, slots.tokens // tile, slots.tokens % tile] = rows

    def read(self, slots: _Slots) -> torch.Tensor:
        """Copy rows [num_tokens, num_kv_heads, head_dim] out of the blocks."""
        if not self.pattern:
            flat, index = self._flat_index(slots)
            return flat[index]
        tile = self.pattern[0]
        rows = self._token_view()[slots.blocks, slots.tokens // tile, slots.tokens % tile]
        return rows.reshape(len(slots.tokens), self.cache.shape[1], self.cache.shape[3] // 2)

    def _token_view(self) -> torch.Tensor:
        """The areas as [num_blocks, tiles, tile, num_kv_heads, head_dim / pair, pair]: tokens first."""
        blocks, heads, block_size, width = self.cache.shape
        tile, pair, tile_stride = self.pattern
        sizes = (blocks, block_size // tile, tile, heads, width // 2 // pair, pair)
        strides = (self.cache.stride(0), tile_stride, pair, self.cache.stride(1), tile * pair, 1)
        return self.cache.as_strided(sizes, strides, self.cache.storage_offset() + self.offset)

    def _flat_index(self, slots: _Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as one flat tensor, and the indexes [num_tokens, num_kv_heads, head_dim] in it."""
        _, heads, block_size, width = self.cache.shape
        order = self.order.to(self.cache.device).view(block_size, width // 2).long()
        head = torch.arange(heads, device=self.cache.device) * self.cache.stride(1)
        start = slots.blocks * self.cache.stride(0) + self.offset
        index = start[:, None, None] + head[None, :, None] + order[slots.tokens][:, None, :]
        sizes = zip(self.cache.shape, self.cache.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
        return self.cache.as_strided((extent,), (1,), self.cache.storage_offset()), index


def _items(ranges: torch.Tensor) -> list[TransferRange]:
    return [TransferRange(*row) for row in ranges.tolist()]


def _record_rows(
    cache: torch.Tensor, item: TransferRange, storage_dtype: torch.dtype, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value rows of the range in its record: two views [num_tokens, num_kv_heads, head_dim]."""
    shape = (2, item.record_tokens, cache.shape[1], cache.shape[3] // 2)
    layer_bytes = 2 * item.record_tokens * shape[2] * shape[3] * storage_dtype.itemsize
    memory = (ctypes.c_char * layer_bytes).from_address(item.record_address + layer * layer_bytes)
    rows = torch.frombuffer(memory, dtype=storage_dtype).view(shape)
    rows = rows[:, item.src_token_start : item.src_token_start + item.num_tokens]
    return rows[0], rows[1]


def _rotate_ranges(
    keys: torch.Tensor,
    ranges: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    neox: bool,
) -> torch.Tensor:
    """R(Δ) k in place for float32 `keys` [num_tokens, num_kv_heads, head_dim], range after range."""
    if cos is None or sin is None:
        return keys
    rotary_dim, start = 2 * cos.shape[1], 0
    for item in _items(ranges):
        turned = keys[start : start + item.num_tokens, :, :rotary_dim]
        start += item.num_tokens
        if item.rope_row == NO_ROTATION:
            continue
        x, y = turned.chunk(2, dim=-1) if neox else (turned[..., 0::2], turned[..., 1::2])
        row_cos, row_sin = cos[item.rope_row], sin[item.rope_row]
        new_x, new_y = x * row_cos - y * row_sin, y * row_cos + x * row_sin
        x.copy_(new_x)
        y.copy_(new_y)
    return keys
