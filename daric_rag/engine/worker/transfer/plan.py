"""What to move between canonical records and KV blocks: immutable, bounds-checked messages to the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from daric_rag.engine.worker.kv_layout import SUPPORTED_DTYPES, KVLayout

NO_ROTATION = -1
NO_RECORD = 0


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
    rotary_dim: int
    neox: bool

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim is {self.rotary_dim}, must be even and at least 2")
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] != self.rotary_dim // 2:
                raise ValueError(
                    f"{name} is {table.dtype} {tuple(table.shape)}, "
                    f"must be float32 [rows, {self.rotary_dim // 2}]"
                )
        if self.cos.shape != self.sin.shape:
            raise ValueError(f"cos has shape {tuple(self.cos.shape)}, sin {tuple(self.sin.shape)}")

    @cached_property
    def _tables_by_device(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous `cos` and `sin` on `device`, copied there once."""
        if device not in self._tables_by_device:
            self._tables_by_device[device] = (
                self.cos.to(device).contiguous(),
                self.sin.to(device).contiguous(),
            )
        return self._tables_by_device[device]


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Many ranges moved by one call per layer; make it with `build`, which checks every bound.

    `ranges`: int64 [n, 7], the fields of TransferRange. `pieces`: int64 [p, 5], the ranges cut at block
    boundaries (index of the range, block id, first and end token within the block, first token within the
    range). A record is contiguous [num_layers, 2 (K, V), record_tokens, num_kv_heads, head_dim] in
    `storage_dtype`; the caller keeps its memory and the plan alive, on CUDA until the stream has passed
    the call. CUDA kernels access pinned records directly; others are copied.
    """

    ranges: torch.Tensor
    pieces: torch.Tensor
    storage_dtype: torch.dtype
    num_layers: int
    num_blocks: int
    block_size: int
    num_tokens: int
    rope_rows: int
    has_records: bool
    destinations_disjoint: bool

    @classmethod
    def build(
        cls,
        ranges: Sequence[TransferRange] | torch.Tensor,
        block_tables: Sequence[int] | torch.Tensor,
        *,
        layout: KVLayout,
        num_blocks: int,
        num_layers: int,
        storage_dtype: torch.dtype,
    ) -> TransferPlan:
        """Check that ranges lie inside their records and tables, block ids inside a cache of `num_blocks`.

        `record_address` 0 stands for "no record" (rotation in place only). Ranges of 0 tokens are dropped.
        Raises ValueError naming the range, the field, its value and what is allowed.
        """
        if storage_dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"storage_dtype is {storage_dtype}, must be one of {SUPPORTED_DTYPES}")
        if num_layers < 1:
            raise ValueError(f"num_layers is {num_layers}, must be at least 1")
        table = _as_int64(block_tables, "block_tables", 1)
        rows = _as_int64(ranges if len(ranges) else torch.empty(0, 7, dtype=torch.int64), "ranges", 2)
        _check_ranges(rows, len(table), layout.block_size)
        rows = rows[rows[:, 3] > 0]
        pieces = _block_pieces(rows, table, layout.block_size)
        _check_block_ids(pieces, num_blocks)
        return cls(
            ranges=torch.from_numpy(rows),
            pieces=torch.from_numpy(pieces),
            storage_dtype=storage_dtype,
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=layout.block_size,
            num_tokens=int(rows[:, 3].sum()),
            rope_rows=int(rows[:, 6].max(initial=NO_ROTATION)) + 1,
            has_records=bool((rows[:, 0] != NO_RECORD).all()),
            destinations_disjoint=_are_disjoint(pieces),
        )

    @cached_property
    def _copies_by_device(self) -> dict[torch.device, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """`ranges` and `pieces` on `device`, copied there once."""
        if device not in self._copies_by_device:
            self._copies_by_device[device] = (self.ranges.to(device), self.pieces.to(device))
        return self._copies_by_device[device]


def _as_int64(
    values: Sequence[int] | Sequence[TransferRange] | torch.Tensor, name: str, dims: int
) -> NDArray[np.int64]:
    """A fresh contiguous int64 array, so that later changes of the caller's tensor cannot undo the checks."""
    array = values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.size == 0:
        array = array.astype(np.int64)
    if (
        array.ndim != dims
        or array.dtype.kind not in "iu"
        or (dims == 2 and array.shape[1] != len(TransferRange._fields))
    ):
        raise ValueError(
            f"{name} is {array.dtype} {array.shape}, must be integers of {'[n]' if dims == 1 else '[n, 7]'}"
        )
    return np.array(array, dtype=np.int64, order="C")


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
