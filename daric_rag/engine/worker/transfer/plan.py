"""What to move between canonical records and KV blocks: immutable, bounds-checked messages to the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from daric_rag.engine.worker.kv_layout import SUPPORTED_DTYPES, KVCaches

NO_ROTATION = -1
NO_RECORD = 0


class Kind(IntEnum):
    """What a transfer does; `Op` of csrc/transfer.h."""

    SCATTER = 0
    GATHER = 1
    ROTATE = 2


class TransferRange(NamedTuple):
    """`num_tokens` tokens of one record and where they lie in one block table.

    Token i of the range is token `src_token_start + i` of the record at host address `record_address`, which
    holds `record_tokens` tokens, and lies at token `dst_token_start + i` of the block table that starts at
    entry `block_table_offset` of the plan's `block_tables`. `rope_row` is a row of the RopeTable, -1 for no
    rotation.
    """

    record_address: int
    record_tokens: int
    src_token_start: int
    num_tokens: int
    dst_token_start: int
    block_table_offset: int
    rope_row: int = NO_ROTATION


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Rotations by a change of position: `cos`, `sin` float32 [rows, rotary_dim // 2], a row per Δposition.

    k' = R(Δ) k on the first `rotary_dim` dims of a head; the rest is left alone. `neox` pairs dim i with
    i + rotary_dim / 2, otherwise (GPT-J) dim 2i with 2i + 1.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    neox: bool

    def __post_init__(self) -> None:
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table.dtype != torch.float32 or table.dim() != 2 or table.shape != self.cos.shape:
                raise ValueError(
                    f"{name} is {table.dtype} {tuple(table.shape)}, must be float32 [rows, rotary_dim // 2] "
                    f"like cos {tuple(self.cos.shape)}"
                )

    @property
    def rotary_dim(self) -> int:
        """How many dims of a head turn."""
        return 2 * self.cos.shape[1]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Many ranges moved by one call per layer; make it with `build`, which checks every bound.

    `ranges`: int64 [n, 7], the fields of TransferRange. `pieces`: int64 [p, 5], the ranges cut at block
    boundaries (index of the range, block id, first and end token within the block, first token within the
    range). A record is contiguous [num_layers, 2 (K, V), record_tokens, num_kv_heads, head_dim] in
    `storage_dtype`; its memory is the caller's. `rope_rows`: how many rows of a RopeTable the ranges name.
    """

    caches: KVCaches
    ranges: torch.Tensor
    pieces: torch.Tensor
    storage_dtype: torch.dtype
    rope_rows: int

    @classmethod
    def build(
        cls,
        ranges: Sequence[TransferRange],
        block_tables: Sequence[int],
        caches: KVCaches,
        storage_dtype: torch.dtype,
    ) -> TransferPlan:
        """Check that ranges lie inside their records and tables, block ids inside the caches.

        `record_address` 0 stands for "no record" (rotation in place only). Ranges of 0 tokens are dropped.
        Raises ValueError naming the range, the field, its value and what is allowed.
        """
        if storage_dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"storage_dtype is {storage_dtype}, must be one of {SUPPORTED_DTYPES}")
        block_size = caches.layout.block_size
        table = np.array(block_tables, dtype=np.int64).reshape(-1)
        rows = np.array(ranges, dtype=np.int64).reshape(-1, len(TransferRange._fields))
        _check_ranges(rows, len(table), block_size)
        rows = rows[rows[:, 3] > 0]
        pieces = _block_pieces(rows, table, block_size)
        _check_block_ids(pieces, caches.num_blocks)
        rope_rows = int(rows[:, 6].max(initial=NO_ROTATION)) + 1
        return cls(caches, torch.from_numpy(rows), torch.from_numpy(pieces), storage_dtype, rope_rows)

    def check(self, kind: Kind, rope: RopeTable | None) -> None:
        """Raise ValueError unless the plan can be carried out as a `kind`, with the rotations of `rope`."""
        if kind is not Kind.ROTATE and bool((self.ranges[:, 0] == NO_RECORD).any()):
            raise ValueError(f"a range has record_address 0, but {kind.name} needs records")
        if kind is Kind.GATHER:
            return
        if not _are_disjoint(self.pieces.numpy()):
            raise ValueError("two ranges of the plan write the same slot of a block")
        rows = 0 if rope is None else len(rope.cos)
        if rows < self.rope_rows:
            raise ValueError(f"rope has {rows} rows, the plan needs {self.rope_rows}")
        head_dim = self.caches.layout.head_dim
        if rope is not None and not 2 <= rope.rotary_dim <= head_dim:
            raise ValueError(f"rope.rotary_dim is {rope.rotary_dim}, must be 2 to head_dim {head_dim}")

    def select(self, wanted: torch.Tensor) -> TransferPlan:
        """The plan of some of the ranges: `wanted` is bool [n]."""
        pieces = self.pieces[wanted[self.pieces[:, 0]]]
        pieces[:, 0] = (wanted.cumsum(0) - 1)[pieces[:, 0]]
        return replace(self, ranges=self.ranges[wanted], pieces=pieces)


def _check_ranges(rows: NDArray[np.int64], num_entries: int, block_size: int) -> None:
    address, record_tokens, src, count, dst, offset, _ = rows.T
    far = np.int64(2**40)  # no sum below can overflow once every field is under it
    for position, field in enumerate(TransferRange._fields):
        lowest = NO_ROTATION if field == "rope_row" else 0
        too_far = (rows[:, position] >= far) if field != "record_address" else np.zeros(len(rows), dtype=bool)
        _refuse(rows, (rows[:, position] < lowest) | too_far, field, f"{lowest} to 2**40")
    has_record = address != NO_RECORD
    _refuse(
        rows,
        has_record & (src + count > record_tokens),
        "src_token_start + num_tokens",
        "at most record_tokens",
    )
    last_entry = offset + (dst + count - 1) // block_size
    _refuse(
        rows,
        (count > 0) & (last_entry >= num_entries),
        "block_table_offset + last block",
        f"below the {num_entries} entries of block_tables",
    )


def _refuse(rows: NDArray[np.int64], bad: NDArray[np.bool_], what: str, allowed: str) -> None:
    if bad.any():
        index = int(np.argmax(bad))
        raise ValueError(
            f"ranges[{index}]: {what} must be {allowed}; got {TransferRange(*rows[index].tolist())}"
        )


def _block_pieces(rows: NDArray[np.int64], table: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """`TransferPlan.pieces` of `rows`, in their order."""
    count, dst, offset = rows[:, 3], rows[:, 4], rows[:, 5]
    first = dst // block_size
    blocks = (dst + count - 1) // block_size - first + 1
    owner = np.repeat(np.arange(len(rows)), blocks)
    block = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    begin = np.maximum(dst[owner] - block * block_size, 0)
    end = np.minimum((dst + count)[owner] - block * block_size, block_size)
    first_token = block * block_size + begin - dst[owner]
    pieces: NDArray[np.int64] = np.stack(
        [owner, table[offset[owner] + block], begin, end, first_token], axis=1
    )
    return np.ascontiguousarray(pieces)


def _check_block_ids(pieces: NDArray[np.int64], num_blocks: int) -> None:
    bad = (pieces[:, 1] < 0) | (pieces[:, 1] >= num_blocks)
    if bad.any():
        raise ValueError(f"block id {pieces[bad][0, 1]} in block_tables, must be 0 to {num_blocks - 1}")


def _are_disjoint(pieces: NDArray[np.int64]) -> bool:
    _, block, begin, end, _ = pieces[np.lexsort((pieces[:, 2], pieces[:, 1]))].T
    return not bool(((block[1:] == block[:-1]) & (begin[1:] < end[:-1])).any())
