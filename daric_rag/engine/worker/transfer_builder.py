"""From the chunks of a pass to the ranges that the transfer kernels move."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from daric_rag.engine.scheduling.plan import StepPlan
from daric_rag.engine.storage.base import WriteHandle
from daric_rag.engine.storage.store import KVStore
from daric_rag.engine.token_ranges import TokenRange, subtract
from daric_rag.engine.worker.correction import Positions
from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.passes import Generation
from daric_rag.engine.worker.rope import RopeParameters, delta_table
from daric_rag.engine.worker.step_work import LoadedChunk
from daric_rag.engine.worker.transfer import (
    NO_RECORD,
    NO_ROTATION,
    BlockRange,
    InPlace,
    Kind,
    RopeTable,
    Transfer,
    TransferPlan,
    TransferRange,
)


class TransferBuilder:
    """Collects the ranges of one transfer; every request's block table and every Δposition appears once."""

    def __init__(self, caches: KVCaches, dtype: torch.dtype, rope: RopeParameters) -> None:
        self._caches = caches
        self._dtype = dtype
        self._rope = rope
        self.ranges: list[TransferRange] = []
        self.block_tables: list[int] = []
        self._deltas: dict[int, int] = {}
        self._offsets: dict[str, int] = {}

    def rope_row(self, delta: int) -> int:
        """Row of the rotation by `delta` positions; none for 0."""
        return self._deltas.setdefault(delta, len(self._deltas)) if delta else NO_ROTATION

    def _table(self, request_id: str, block_ids: Sequence[int]) -> int:
        """Where the request's block table starts."""
        if request_id not in self._offsets:
            self._offsets[request_id] = len(self.block_tables)
            self.block_tables.extend(block_ids)
        return self._offsets[request_id]

    def window(self, plan: StepPlan, start: int, end: int) -> BlockRange:
        """Where the tokens `[start, end)` of a request's text lie."""
        return BlockRange(end - start, start, self._table(plan.request_id, plan.block_ids))

    def in_place(self, windows: Sequence[BlockRange]) -> InPlace:
        """Access to the KV of such tokens."""
        return InPlace(windows, self.block_tables, self._caches)

    def positions(self, encoded: torch.Tensor, offsets: torch.Tensor) -> Positions:
        """Where tokens of chunks stand, see `Positions.of`."""
        return Positions.of(encoded, offsets, self._rope, self._caches.device)

    def add_load(self, loaded: LoadedChunk, recomputed: Sequence[TokenRange], *, reencode: bool) -> None:
        """Write a chunk's segments into its blocks, without the positions that are recomputed."""
        chunk, plan = loaded.chunk, loaded.plan
        offset = self._table(plan.request_id, plan.block_ids)
        row = self.rope_row(chunk.start) if reencode else NO_ROTATION
        segments = chunk.segments[loaded.first_segment :]
        for segment, handle in zip(segments, loaded.handles, strict=False):
            begin = chunk.start + segment.start
            wanted = [(max(begin, chunk.write_from), chunk.start + segment.end)]
            for start, end in subtract(wanted, recomputed):
                source = (handle.address, handle.num_tokens, start - begin)
                self.ranges.append(TransferRange(*source, end - start, start, offset, row))

    def add_save(self, generation: Generation, store: KVStore) -> list[WriteHandle]:
        """Read a generated chunk's segments out of its blocks; the handles of those that the store can take."""
        chunk, plan = generation.chunk, generation.plan
        offset = self._table(plan.request_id, plan.block_ids)
        handles = []
        for segment in chunk.segments:
            if segment.end <= generation.num_loaded:
                continue
            count = segment.num_tokens
            handle = store.reserve(segment.key, segment.parent, count, namespace=plan.namespace)
            if handle is not None:
                handles.append(handle)
                start = chunk.start + segment.start
                self.ranges.append(TransferRange(handle.address, count, 0, count, start, offset))
        return handles

    def add_rotation(self, generation: Generation) -> None:
        """Rotate a generated chunk's keys from chunk-relative positions to those it has in the prompt."""
        chunk, plan = generation.chunk, generation.plan
        if chunk.start > 0:
            offset, row = self._table(plan.request_id, plan.block_ids), self.rope_row(chunk.start)
            count = chunk.end - chunk.start
            self.ranges.append(TransferRange(NO_RECORD, 0, 0, count, chunk.start, offset, row))

    def build(self, kind: Kind) -> Transfer | None:
        """What moves all of it; None if there is nothing to move."""
        if not self.ranges:
            return None
        plan = TransferPlan.build(self.ranges, self.block_tables, self._caches, self._dtype)
        if not self._deltas:
            return Transfer(kind, plan)
        return Transfer(kind, plan, RopeTable(*delta_table(self._rope, list(self._deltas)), self._rope.neox))
