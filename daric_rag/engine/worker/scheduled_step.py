"""vLLM's scheduler output of one step, sorted for the passes that it becomes (rebuild_scheduler_output, paper §3.4).

This file, `worker.py` and the connector are the places that know vLLM's internals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from daric_rag.engine.scheduling.plan import StepPlan


class ScheduledStep:
    """The requests of one step: those with plans, decodes, and all others.

    All requests without a plan are in the last pass. `decodes_in_every_pass`: decodes are in the earlier ones too.
    """

    def __init__(
        self, original: SchedulerOutput, plans: Sequence[StepPlan], *, decodes_in_every_pass: bool
    ) -> None:
        self.original = original
        planned = {plan.request_id for plan in plans}
        self._other_new = [one for one in original.scheduled_new_reqs if one.req_id not in planned]
        cached = original.scheduled_cached_reqs
        self._others: list[int] = []
        self._in_every_pass: list[int] = []
        for position, request_id in enumerate(cached.req_ids):
            if request_id in planned:
                continue
            is_decode = cached.num_output_tokens[position] > 0 and request_id not in cached.resumed_req_ids
            (self._in_every_pass if is_decode and decodes_in_every_pass else self._others).append(position)
        self._finished: set[str] = set(original.finished_req_ids)
        self._is_first = True
        # Requests that the model runner has been given their blocks of this step for: that happens once.
        self._announced: set[str] = set()

    def load(self, *, is_last: bool) -> tuple[int, int]:
        """Tokens and rows of the requests without a plan in a pass."""
        scheduled = self.scheduled(is_last)
        return sum(scheduled.values()), len(scheduled)

    def scheduled(self, is_last: bool) -> dict[str, int]:
        """Scheduled tokens of the requests without a plan that are in a pass."""
        source, counts = self.original.scheduled_cached_reqs, self.original.num_scheduled_tokens
        ids = [source.req_ids[position] for position in self._positions(is_last)]
        if is_last:
            ids += [request.req_id for request in self._other_new]
        return {request_id: counts[request_id] for request_id in ids}

    def _positions(self, is_last: bool) -> list[int]:
        return self._in_every_pass + (self._others if is_last else [])

    def num_output_tokens(self, request_id: str) -> int:
        """Tokens that a request had generated: some, if it was resumed."""
        cached = self.original.scheduled_cached_reqs
        if request_id not in cached.req_ids:
            return 0
        return cached.num_output_tokens[cached.req_ids.index(request_id)]

    def announce(self, request_id: str) -> bool:
        """Note that the model runner is given a request's blocks; False if it has them already."""
        if request_id in self._announced:
            return False
        self._announced.add(request_id)
        return True

    def requests(self, is_last: bool) -> tuple[list[NewRequestData], CachedRequestData]:
        """The requests without a plan that are in a pass: those new to the model runner, and those it knows."""
        source, positions = self.original.scheduled_cached_reqs, self._positions(is_last)
        ids = [source.req_ids[position] for position in positions]
        repeated = {request_id for request_id in ids if not self.announce(request_id)}
        cached = CachedRequestData(
            req_ids=ids,
            resumed_req_ids={one for one in ids if one in source.resumed_req_ids and one not in repeated},
            new_token_ids=[source.new_token_ids[p] for p in positions] if source.new_token_ids else [],
            all_token_ids=dict(source.all_token_ids),
            new_block_ids=[
                None if one in repeated else source.new_block_ids[p]
                for one, p in zip(ids, positions, strict=True)
            ],
            num_computed_tokens=[source.num_computed_tokens[p] for p in positions],
            num_output_tokens=[source.num_output_tokens[p] for p in positions],
        )
        new = []
        for request in self._other_new if is_last else ():
            if self.announce(request.req_id):
                new.append(request)
            else:  # the pass is repeated
                cached.req_ids.append(request.req_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed_tokens)
                cached.num_output_tokens.append(0)
        return new, cached

    def take_finished(self) -> set[str]:
        """Requests that ended before this step; named once."""
        finished, self._finished = self._finished, set()
        return finished

    def take_once(self) -> dict[str, Any]:
        """Work on blocks that must happen before the first pass and never again."""
        if self._is_first:
            self._is_first = False
            return {}
        return {"new_block_ids_to_zero": None, "kv_cache_block_copies": None, "free_encoder_mm_hashes": []}
