"""The scheduler's half of the connector: index look-up, hit groups, and one reuse plan per request (paper §3.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.index.base import KVIndex
from daric_rag.engine.scheduling.plan import ChunkLayout, RequestPlan, StepPlan
from daric_rag.engine.scheduling.report_book import ReportBook
from daric_rag.engine.scheduling.unfilled_blocks import UnfilledBlocks
from daric_rag.engine.storage.base import StoreEvent


@dataclass(frozen=True)
class ScheduledRequest:
    """A request's part in vLLM's step: `num_scheduled` tokens after `num_computed`.

    `starts`: its first step, or its first after a preemption.
    """

    request_id: str
    num_computed: int
    num_scheduled: int
    starts: bool


@dataclass
class _Tracked:
    """A request with reuse, from its arrival to its end.

    `plan`: made at the first look-up, again when the text has grown (a preempted request). `looked_up`: the
    version of the index that the plan's hits are from. `l_gpu`: the engine's own prefix hit, in tokens.
    """

    plan: RequestPlan
    looked_up: int | None = None
    l_gpu: int = 0
    prefilling: bool = True


class SchedulerSide:
    """Plans every request that carries a chunk layout; all others never come here.

    Not thread-safe: vLLM's scheduler calls it from one thread.
    """

    def __init__(self, index: KVIndex, block_size: int) -> None:
        self.index = index
        self._block_size = block_size
        self._tracked: dict[str, _Tracked] = {}
        self._unfilled = UnfilledBlocks()
        self._reports = ReportBook()

    def num_external_tokens(
        self,
        request_id: str,
        layout: ChunkLayout,
        token_ids: Sequence[int],
        l_gpu: int,
        root: Callable[[str], bytes],
    ) -> int:
        """L_hit - L_gpu for a request about to be scheduled (paper §3.3.1): what the worker loads in the same step.

        vLLM asks again every step that the request waits. Its tokens are hashed once, and the index is asked
        again only after it has changed.
        """
        started = time.perf_counter()
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.plan.num_tokens != len(token_ids):
            plan = RequestPlan.make(request_id, layout, token_ids, root)
            tracked = self._tracked[request_id] = _Tracked(plan)
        tracked.l_gpu, tracked.prefilling = l_gpu, True
        version = self.index.version
        if tracked.looked_up != version:
            tracked.plan.set_cached(self.index.lookup(tracked.plan.chains()))
            tracked.looked_up = version
        l_cont = tracked.plan.num_contiguous_hit_tokens(self._block_size)
        self._reports.of(request_id).lookup_s += time.perf_counter() - started
        l_hit = max(l_gpu, l_cont)
        return l_hit - l_gpu

    def plan(
        self, scheduled: Iterable[ScheduledRequest], block_table: Callable[[str], Sequence[int]]
    ) -> tuple[StepPlan, ...]:
        """The plans of a step, one for each request in its prefill; `block_table` gives a request's block ids.

        `scheduled` comes in the order in which vLLM scheduled: a request that was given blocks of another one
        stands behind it, so what the plans before fill in may be read by those after.
        """
        return tuple(
            self._step(one, block_table(one.request_id))
            for one in scheduled
            if self._is_prefilling(one.request_id)
        )

    def _step(self, scheduled: ScheduledRequest, block_ids: Sequence[int]) -> StepPlan:
        request_id, size = scheduled.request_id, self._block_size
        tracked = self._tracked[request_id]
        plan, report = tracked.plan, self._reports.of(request_id)
        if scheduled.starts:
            plan.begin(self._unfilled.num_filled(block_ids[: tracked.l_gpu // size]) * size)
            report.engine_hit_tokens = plan.clip_to_prompt(0, plan.num_prefix_tokens)
        else:
            filled = self._unfilled.num_filled_by_others(request_id)
            before = plan.done
            plan.skip_filled((before // size + filled) * size)
            report.engine_hit_tokens += plan.clip_to_prompt(before, plan.done)
        first = plan.done // size
        step = plan.advance(
            scheduled.num_computed + scheduled.num_scheduled, block_ids, self._reports.attempt(request_id)
        )
        filled_until = len(block_ids) if step.is_final else plan.done // size
        self._unfilled.fill(block_ids[first:filled_until])
        self._unfilled.hold(request_id, block_ids[filled_until:])
        tracked.prefilling = not step.is_final
        return step

    def _is_prefilling(self, request_id: str) -> bool:
        tracked = self._tracked.get(request_id)
        return tracked is not None and tracked.prefilling

    def preempted(self, request_id: str) -> list[int]:
        """Forget what was planned: the request comes back with new blocks and is planned again.

        Returns the blocks that nobody is going to fill in any more.
        """
        tracked = self._tracked.get(request_id)
        if tracked is not None:
            tracked.prefilling = False
            self._reports.restart(request_id)
        return self._unfilled.drop(request_id)

    def finished(self, request_id: str) -> tuple[dict[str, Any] | None, list[int]]:
        """Drop a request that ended or was aborted: what its report says, None if it had no reuse.

        Also returns the blocks that nobody is going to fill in any more.
        """
        orphans = self._unfilled.drop(request_id)
        if self._tracked.pop(request_id, None) is None:
            return None, orphans
        return self._reports.close(request_id), orphans

    def next_step(self) -> None:
        """A new step begins: the reports of requests that ended in the last one are complete."""
        self._reports.next_step()

    @property
    def num_tracked(self) -> int:
        """Requests in flight; 0 when idle."""
        return len(self._tracked)

    @property
    def num_unfilled_blocks(self) -> int:
        """Blocks that are promised and not filled in; 0 when idle."""
        return len(self._unfilled)

    def add_reports(self, reports: Mapping[str, RequestReport]) -> None:
        """Take in what the worker says of a step; requests that were aborted meanwhile are passed over."""
        for request_id, report in reports.items():
            self._reports.add(request_id, report)

    def apply(self, missing: Sequence[SegmentKey], events: Iterable[StoreEvent]) -> None:
        """Bring the index up to date with what the worker's store lacked and, after that, with what it did."""
        self.index.remove(missing)
        for event in events:
            change = self.index.insert if event.kind == "added" else self.index.remove
            change([event.key], event.tier)
