"""Moving KV between canonical records in host memory and the paged blocks of one layer."""

from __future__ import annotations

import torch

from daric_rag.engine import transfer_reference
from daric_rag.engine.kv_layout import KVLayout
from daric_rag.engine.transfer_plan import NO_RECORD, NO_ROTATION, RopeTable, TransferPlan, TransferRange

__all__ = [
    "NO_RECORD",
    "NO_ROTATION",
    "RopeTable",
    "TransferPlan",
    "TransferRange",
    "gather_",
    "rotate_",
    "scatter_",
]


def scatter_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Write layer `layer` of the plan's records into the blocks of `cache`, keys rotated by their Δposition.

    Storage dtype is converted to the cache's; the rotation is computed in float32. Raises ValueError if the
    cache, layer or rope table do not fit the plan, or two ranges write the same slot.
    """
    _check(cache, layout, plan, layer, rope, reads_records=True, writes_blocks=True)
    transfer_reference.scatter_(cache, layout, plan, layer, rope)


def gather_(cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int) -> None:
    """Read layer `layer` of the plan's records out of the blocks of `cache`, converted to the storage dtype.

    Nothing is rotated: `rope_row` is ignored. Raises ValueError if the cache or layer do not fit the plan.
    """
    _check(cache, layout, plan, layer, None, reads_records=True, writes_blocks=False)
    transfer_reference.gather_(cache, layout, plan, layer)


def rotate_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Rotate the keys covered by the plan in place; records and ranges without a `rope_row` are left alone.

    Raises ValueError if the cache or rope table do not fit the plan, or two ranges rotate the same slot.
    """
    _check(cache, layout, plan, layer, rope, reads_records=False, writes_blocks=True)
    transfer_reference.rotate_(cache, layout, plan, layer, rope)


def _check(
    cache: torch.Tensor,
    layout: KVLayout,
    plan: TransferPlan,
    layer: int,
    rope: RopeTable | None,
    *,
    reads_records: bool,
    writes_blocks: bool,
) -> None:
    """The checks that `TransferPlan.build` could not make; constant time."""
    layout.check_cache(cache, plan.num_blocks)
    if not 0 <= layer < plan.num_layers:
        raise ValueError(f"layer is {layer}, must be 0 to {plan.num_layers - 1}")
    if reads_records and not plan.has_records:
        raise ValueError("a range has record_address 0; only rotate_ works without records")
    if not writes_blocks:
        return
    if not plan.destinations_disjoint:
        raise ValueError("two ranges of the plan write the same slot of a block")
    if plan.rope_rows == 0:
        return
    if rope is None or rope.cos.shape[0] < plan.rope_rows:
        raise ValueError(
            f"rope has {0 if rope is None else rope.cos.shape[0]} rows, the plan needs {plan.rope_rows}"
        )
    if rope.rotary_dim > layout.head_dim:
        raise ValueError(f"rope.rotary_dim is {rope.rotary_dim}, must be at most head_dim {layout.head_dim}")
