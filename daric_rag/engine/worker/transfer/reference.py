"""Pure-torch transfer: what the compiled kernels must equal, and what runs where they were not built."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from daric_rag.engine.worker.kv_layout import KVLayout, PackedOrder
from daric_rag.engine.worker.rope import rotate
from daric_rag.engine.worker.transfer.plan import (
    NO_ROTATION,
    Kind,
    RopeTable,
    TransferPlan,
    TransferRange,
)


class Reference:
    """One kind of transfer of a plan, for caches on any device and records in host memory.

    `rows`: the ranges' part of their records, where that is not what the plan's addresses say.
    """

    def __init__(
        self,
        kind: Kind,
        plan: TransferPlan,
        rope: RopeTable | None,
        rows: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._layout, device = plan.caches.layout, plan.caches.device
        self._kind = kind
        self._rope = rope and replace(rope, cos=rope.cos.to(device), sin=rope.sin.to(device))
        self._items = [TransferRange(*row) for row in plan.ranges.tolist()]
        self._tokens = [item.num_tokens for item in self._items]
        self._slots = _Slots.of(plan.pieces.to(device))
        if rows is None and kind is not Kind.ROTATE:
            rows = [record_rows(plan, item) for item in self._items]
        self._rows = rows or []

    def run(self, cache: torch.Tensor, layer: int) -> None:
        """Move one layer."""
        layout = self._layout
        keys = _Area(cache, layout, layout.key_order, layout.key_pattern, 0)
        values = _Area(cache, layout, layout.value_order, layout.value_pattern, layout.value_offset)
        if not self._items:
            return
        if self._kind is Kind.ROTATE:
            keys.write(self._slots, self._rotated(keys.read(self._slots)))
        elif self._kind is Kind.SCATTER:
            moved = torch.cat([rows[layer] for rows in self._rows], dim=1).to(cache.device)
            keys.write(self._slots, self._rotated(moved[0]))
            values.write(self._slots, moved[1].to(cache.dtype))
        else:
            found = torch.stack((keys.read(self._slots), values.read(self._slots)))
            for rows, part in zip(self._rows, found.split_with_sizes(self._tokens, dim=1), strict=True):
                rows[layer].copy_(part)

    def _rotated(self, keys: torch.Tensor) -> torch.Tensor:
        """R(Δ) k for `keys` [num_tokens, num_kv_heads, head_dim], range after range, in the caches' dtype."""
        rope, turned = self._rope, []
        for item, part in zip(self._items, keys.float().split_with_sizes(self._tokens), strict=True):
            if rope is None or item.rope_row == NO_ROTATION:
                turned.append(part)
            else:
                cos, sin = rope.cos[item.rope_row][None], rope.sin[item.rope_row][None]
                turned.append(rotate(part, cos, sin, rope.neox, rope.rotary_dim))
        return torch.cat(turned).to(self._layout.dtype)


def record_rows(plan: TransferPlan, item: TransferRange) -> torch.Tensor:
    """The range's rows in its record: a view [num_layers, 2 (K, V), num_tokens, num_kv_heads, head_dim]."""
    caches, dtype = plan.caches, plan.storage_dtype
    layout = caches.layout
    shape = (len(caches.layers), 2, item.record_tokens, layout.num_kv_heads, layout.head_dim)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    memory = (ctypes.c_char * nbytes).from_address(item.record_address)
    record = torch.frombuffer(memory, dtype=dtype).view(shape)
    return record[:, :, item.src_token_start : item.src_token_start + item.num_tokens]


@dataclass(frozen=True)
class _Slots:
    """Block ids and tokens within the block, int64 [num_tokens] each, of all tokens of a plan in order."""

    blocks: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, pieces: torch.Tensor) -> _Slots:
        _, block, begin, end, _ = pieces.unbind(1)
        lengths = end - begin
        starts = lengths.cumsum(0) - lengths
        inside = torch.arange(int(lengths.sum()), device=pieces.device) - starts.repeat_interleave(lengths)
        return cls(block.repeat_interleave(lengths), begin.repeat_interleave(lengths) + inside)


@dataclass(frozen=True)
class _Area:
    """The K or the V areas of a layer; `offset` is where they start in each (block, head)."""

    cache: torch.Tensor
    layout: KVLayout
    order: torch.Tensor
    pattern: PackedOrder | None
    offset: int

    def write(self, slots: _Slots, rows: torch.Tensor) -> None:
        """Write `rows` [num_tokens, num_kv_heads, head_dim], already in the cache's dtype."""
        if self.pattern is None:
            flat, index = self._flat_index(slots)
            flat.index_put_((index.reshape(-1),), rows.reshape(-1))
            return
        tile, pair = self.pattern.tile, self.pattern.pair
        rows = rows.reshape(*rows.shape[:2], rows.shape[2] // pair, pair)
        self._token_view(self.pattern)[slots.blocks, slots.tokens // tile, slots.tokens % tile] = rows

    def read(self, slots: _Slots) -> torch.Tensor:
        """Copy rows [num_tokens, num_kv_heads, head_dim] out of the blocks."""
        if self.pattern is None:
            flat, index = self._flat_index(slots)
            return flat[index]
        tile = self.pattern.tile
        rows = self._token_view(self.pattern)[slots.blocks, slots.tokens // tile, slots.tokens % tile]
        return rows.reshape(len(slots.tokens), self.layout.num_kv_heads, self.layout.head_dim)

    def _token_view(self, pattern: PackedOrder) -> torch.Tensor:
        """The areas as [num_blocks, tiles, tile, num_kv_heads, head_dim / pair, pair]: tokens first."""
        layout, cache, (tile, pair) = self.layout, self.cache, (pattern.tile, pattern.pair)
        heads, units = layout.num_kv_heads, layout.head_dim // pair
        sizes = (cache.shape[0], layout.block_size // tile, tile, heads, units, pair)
        strides = (cache.stride(0), pattern.tile_stride, pair, cache.stride(1), tile * pair, 1)
        return cache.as_strided(sizes, strides, cache.storage_offset() + self.offset)

    def _flat_index(self, slots: _Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache as one flat tensor, and the indexes [num_tokens, num_kv_heads, head_dim] in it."""
        cache, layout = self.cache, self.layout
        order = self.order.to(cache.device).view(layout.block_size, layout.head_dim).long()
        head = torch.arange(layout.num_kv_heads, device=cache.device) * cache.stride(1)
        start = slots.blocks * cache.stride(0) + self.offset
        index = start[:, None, None] + head[None, :, None] + order[slots.tokens][:, None, :]
        sizes = zip(cache.shape, cache.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
        return cache.as_strided((extent,), (1,), cache.storage_offset()), index
