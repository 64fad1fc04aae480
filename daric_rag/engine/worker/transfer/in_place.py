"""KV of some ranges in float32, taken out of the blocks a layer at a time, and put back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.transfer.plan import Kind, TransferPlan, TransferRange
from daric_rag.engine.worker.transfer.reference import Reference
from daric_rag.engine.worker.transfer.transfer import implementation


class BlockRange(NamedTuple):
    """`num_tokens` tokens from token `start` of the block table that begins at entry `block_table_offset`."""

    num_tokens: int
    start: int
    block_table_offset: int


class InPlace:
    """A window on the blocks: `read` fills `keys_values` with a layer of the ranges, `write` puts it back.

    `keys_values`: float32 `[2 (K, V), num_tokens, num_kv_heads, head_dim]` on the caches' device, the ranges one
    after the other; keys as they are, with their positions in them. On CUDA both enqueue on the current stream.
    """

    def __init__(self, ranges: Sequence[BlockRange], block_tables: Sequence[int], caches: KVCaches) -> None:
        layout, self._layers = caches.layout, caches.layers
        total = sum(one.num_tokens for one in ranges)
        shape = (2, total, layout.num_kv_heads, layout.head_dim)
        self.keys_values = torch.empty(shape, dtype=torch.float32, device=caches.device)
        address, position, moved = self.keys_values.data_ptr(), 0, []
        for one in ranges:
            # To the kernels it is layer 0 of one record, whichever layer of the model it is.
            source = (address, total, position, one.num_tokens)
            moved.append(TransferRange(*source, one.start, one.block_table_offset))
            position += one.num_tokens
        plan = TransferPlan.build(moved, block_tables, caches, torch.float32)
        make = implementation(plan, None)
        rows = torch.split(self.keys_values[None], [one.num_tokens for one in ranges], dim=2)
        self._read, self._write = (
            Reference(kind, plan, None, rows) if make is Reference else make(kind, plan, None)
            for kind in (Kind.GATHER, Kind.SCATTER)
        )

    def read(self, layer: int) -> torch.Tensor:
        """`keys_values`, filled from `layer` of the caches."""
        self._read.run(self._layers[layer], 0)
        return self.keys_values

    def write(self, layer: int) -> None:
        """Put `keys_values` back."""
        self._write.run(self._layers[layer], 0)
