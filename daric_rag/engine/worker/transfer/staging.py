"""Records that a CUDA kernel does not touch where they are: copied between host and device by DMA."""

from __future__ import annotations

from dataclasses import replace

import torch

from daric_rag.engine.worker.transfer.plan import TransferPlan, TransferRange
from daric_rag.engine.worker.transfer.reference import record_rows

SLOTS = 2


class Staging:
    """Stand-ins of a plan's records on the caches' device, for `SLOTS` layers at a time.

    `plan` is the given one with these for its records: layer `i` of a record is their layer `i % SLOTS`, which
    lies [2 (K, V), num_tokens, num_kv_heads, head_dim]. Copies are enqueued on the current stream; the caller
    orders them with what uses a slot before and after.
    """

    def __init__(self, plan: TransferPlan) -> None:
        layout = plan.caches.layout
        items = [TransferRange(*row) for row in plan.ranges.tolist()]
        self._host = [record_rows(plan, item) for item in items]
        shapes = [(SLOTS, 2, item.num_tokens, layout.num_kv_heads, layout.head_dim) for item in items]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        buffer = torch.empty(sum(sizes), dtype=plan.storage_dtype, device=plan.caches.device)
        parts = zip(buffer.split_with_sizes(sizes), shapes, strict=True)
        self._staged = [part.view(shape) for part, shape in parts]
        ranges = [
            item._replace(record_address=staged.data_ptr(), record_tokens=item.num_tokens, src_token_start=0)
            for item, staged in zip(items, self._staged, strict=True)
        ]
        self.plan = replace(plan, ranges=torch.tensor(ranges, dtype=torch.int64))

    def fetch(self, layer: int) -> None:
        """Copy a layer of the records to its slot; returns early only for records in pinned memory."""
        for host, staged in zip(self._host, self._staged, strict=True):
            _copy(host[layer], staged[layer % SLOTS])

    def deliver(self, layer: int) -> None:
        """Copy a slot back to the layer of the records that it stands for."""
        for host, staged in zip(self._host, self._staged, strict=True):
            _copy(staged[layer % SLOTS], host[layer])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """One copy where keys and values lie side by side on both sides, else two: only these are plain DMA."""
    if source.is_contiguous() and target.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for from_rows, to_rows in zip(source, target, strict=True):
        to_rows.copy_(from_rows, non_blocking=True)
