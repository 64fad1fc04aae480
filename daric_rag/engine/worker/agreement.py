"""What the tensor-parallel ranks decide together.

Each rank has a store and a disk of its own, and one may lack what another has: a record was damaged, evicted, never
written. A forward pass, though, is one for all ranks, so all must cut a step into the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed.parallel_state import get_tp_group


def least_of_all_ranks(counts: Sequence[int]) -> Sequence[int]:
    """The smallest of the ranks' counts, one by one; every rank must ask at the same point, for as many."""
    group = get_tp_group()
    if group.world_size == 1 or not counts:
        return counts
    least = torch.tensor(counts, dtype=torch.int64)
    all_reduce(least, ReduceOp.MIN, group=group.cpu_group)
    result: list[int] = least.tolist()
    return result
