"""The scheduler's half of the connector: index look-up, hit groups, and one reuse plan per request (paper §3.3)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.metrics import RequestHits
from daric_rag.engine.scheduling.index.base import KVIndex
from daric_rag.engine.scheduling.plan import ChunkLayout, RequestPlan, StepPlan
from daric_rag.engine.storage.base import StoreEvent


@dataclass(frozen=True)
class _Unfinished:
    """A request between two steps of its prefill: its block table, of which the first blocks are filled in."""

    block_ids: tuple[int, ...]
    num_filled: int


@dataclass
class _Tracked:
    """A request with reuse, from its arrival to its end; `plan` is None while it is not prefilling."""

    layout: ChunkLayout
    plan: RequestPlan | None = None
    attempt: int = 0
    prefix_tokens: int = 0
    hits: RequestHits = field(default_factory=RequestHits)


class SchedulerSide:
    """Plans every request that carries a chunk layout; all others never come here.

    Not thread-safe: vLLM's scheduler calls it from one thread.
    """

    def __init__(self, index: KVIndex, block_size: int) -> None:
        self.index = index
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        # Requests whose blocks are partly allocated but not yet filled in; others must not trust those blocks.
        self._unfinished: dict[str, _Unfinished] = {}

    def num_external_tokens(
        self,
        request_id: str,
        layout: ChunkLayout,
        token_ids: Sequence[int],
        num_prefix_tokens: int,
        root: bytes,
    ) -> int:
        """max(0, L_cont - L_gpu) for a request about to be scheduled; may be asked again, changes no counts."""
        started = time.perf_counter()
        tracked = self._tracked.setdefault(request_id, _Tracked(layout))
        plan = RequestPlan.make(request_id, layout, token_ids, root)
        plan.attempt = tracked.attempt
        plan.set_cached(self.index.lookup(plan.chains()))
        tracked.plan = plan
        tracked.prefix_tokens = num_prefix_tokens
        contiguous = plan.num_contiguous_hit_tokens(self._block_size)
        tracked.hits.contiguous_hit_tokens = contiguous
        tracked.hits.lookup_s = time.perf_counter() - started
        return max(0, contiguous - num_prefix_tokens)

    def is_tracked(self, request_id: str) -> bool:
        """Whether the request is in flight."""
        return request_id in self._tracked

    def is_prefilling(self, request_id: str) -> bool:
        """Whether the request has a plan that is not finished."""
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.plan is not None

    def step(self, request_id: str, block_ids: Sequence[int], num_covered: int, starts: bool) -> StepPlan:
        """Plan a prefilling request's part of the step, after which vLLM counts `num_covered` tokens as computed.

        `starts`: this is its first step, or its first after a preemption.
        """
        tracked = self._tracked[request_id]
        plan = tracked.plan
        assert plan is not None
        if starts:
            prefix = self._trusted_prefix(tracked.prefix_tokens, block_ids)
            plan.begin(prefix)
            tracked.hits.engine_hit_tokens = min(prefix, plan.layout.bounds[-1][1])
        step = plan.advance(num_covered, block_ids)
        if step.is_final:
            tracked.plan = None
            self._unfinished.pop(request_id, None)
        else:
            self._unfinished[request_id] = _Unfinished(step.block_ids, plan.done // self._block_size)
        return step

    def preempted(self, request_id: str) -> Sequence[int]:
        """Forget what was planned: the request comes back with new blocks and is planned again.

        Returns the blocks that it leaves allocated but not filled in.
        """
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.plan = None
            tracked.attempt += 1
        return self._drop_unfinished(request_id)

    def finished(self, request_id: str) -> tuple[RequestHits | None, Sequence[int]]:
        """Drop a request that ended or was aborted; also returns blocks that it leaves not filled in."""
        tracked = self._tracked.pop(request_id, None)
        return (tracked.hits if tracked else None), self._drop_unfinished(request_id)

    @property
    def num_tracked(self) -> int:
        """Requests in flight; 0 when idle."""
        return len(self._tracked)

    def apply(self, missing: Sequence[SegmentKey], events: Iterable[StoreEvent]) -> None:
        """Bring the index up to date with what the worker's store lacked and, after that, with what it did."""
        self.index.remove(missing)
        for event in events:
            if event.kind == "removed":
                self.index.remove([event.key], event.tier)
                continue
            self.index.insert([event.key], event.tier)
            if event.kind == "tier_changed" and event.tier is Tier.DISK:
                self.index.remove([event.key], Tier.HOST)

    def _drop_unfinished(self, request_id: str) -> Sequence[int]:
        unfinished = self._unfinished.pop(request_id, None)
        return unfinished.block_ids[unfinished.num_filled :] if unfinished else ()

    def _trusted_prefix(self, prefix_tokens: int, block_ids: Sequence[int]) -> int:
        """L_gpu without blocks that another request has allocated but not yet filled in (chunked prefill)."""
        trusted = prefix_tokens // self._block_size
        for other in self._unfinished.values():
            shared = 0
            for mine, theirs in zip(block_ids[:trusted], other.block_ids, strict=False):
                if mine != theirs:
                    break
                shared += 1
            if shared > other.num_filled:
                trusted = other.num_filled
        return trusted * self._block_size
