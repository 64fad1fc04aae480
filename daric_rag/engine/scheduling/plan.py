"""Planning of reuse: which chunks a step loads or generates, and which tokens it recomputes. Pure logic.

A request keeps one `RequestPlan` on the scheduler's side. Every step that computes part of its prompt takes a
frozen `StepPlan` from it, which the worker executes.

Chunked prefill: a step completes the chunks that lie wholly in what it covers (load or generate, re-encode,
recompute their part of I) and leaves a chunk that it covers in part to the step that covers its end. Earlier
ranges are thus always recomputed before later ones, which gives the same KV as one pass over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from daric_rag.engine.keys import Segment, segment_chain
from daric_rag.engine.selection import SelectionSettings, recomputed
from daric_rag.engine.token_ranges import TokenRange, refine, union

EXTRA_ARGS_KEY = "daric"
"""Key of the layout in `SamplingParams.extra_args`."""


@dataclass(frozen=True)
class ChunkLayout:
    """What the client says of a prompt: where chunks lie, and how to reuse them.

    `bounds`: contiguous `[start, end)` token ranges from 0 to the prompt's end; every chunk but the last ends
    on a block boundary. `live`: per chunk, whether it is computed in full context and never cached. `recompute`:
    the recomputation index set I, chosen in the client's process. `warm`: only the chunks' KV is wanted, no answer.
    `profile`: digest of the profile whose correction the chunks' KV gets, "" for none. `calibration`: number of the
    held-out part that the request's chunks are measured for (`worker.calibration`); nothing of them is stored.
    """

    bounds: tuple[TokenRange, ...]
    live: tuple[bool, ...]
    recompute: tuple[TokenRange, ...]
    namespace: str = ""
    warm: bool = False
    profile: str = ""
    calibration: int | None = None

    @classmethod
    def select(
        cls,
        bounds: tuple[TokenRange, ...],
        live: tuple[bool, ...],
        settings: SelectionSettings,
        **fields: Any,
    ) -> ChunkLayout:
        """A layout whose recomputation index set is chosen by `settings`."""
        return cls(bounds, live, tuple(recomputed(bounds, settings)), **fields)

    def to_extra_args(self) -> dict[str, Any]:
        """The form that travels in `SamplingParams.extra_args`: plain JSON values."""
        return {
            "bounds": [list(bound) for bound in self.bounds],
            "live": list(self.live),
            "recompute": [list(chosen) for chosen in self.recompute],
            "namespace": self.namespace,
            "warm": self.warm,
            "profile": self.profile,
            "calibration": self.calibration,
        }

    @classmethod
    def from_extra_args(cls, values: Mapping[str, Any], num_tokens: int, block_size: int) -> ChunkLayout:
        """Read and check a layout; a client is not trusted. Raises `ValueError` saying what is wrong."""
        try:
            bounds = tuple((int(start), int(end)) for start, end in values["bounds"])
            live = tuple(bool(flag) for flag in values["live"])
            recompute = tuple((int(start), int(end)) for start, end in values["recompute"])
            namespace, warm = str(values["namespace"]), bool(values["warm"])
            profile, part = str(values["profile"]), values["calibration"]
            calibration = None if part is None else int(part)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"malformed chunk layout: {error!r}") from None
        _check_bounds(bounds, len(live), num_tokens, block_size)
        if any(not 0 <= start < end <= num_tokens for start, end in recompute):
            raise ValueError(
                f"recomputed ranges {recompute} are not inside the prompt of {num_tokens} tokens"
            )
        return cls(bounds, live, recompute, namespace, warm, profile, calibration)

    def profile_of(self, start: int) -> str:
        """The profile of a chunk at token `start`. At position 0 of a prompt a chunk's own KV is exact.

        A document that is warmed stands at position 0 of a request of its own, but will stand elsewhere.
        """
        return self.profile if start > 0 or self.warm else ""


@dataclass(frozen=True)
class ChunkWork:
    """One cached chunk that a step completes: load its first `num_cached` segments, generate the rest.

    `start`, `end`: absolute token positions. `write_from`: first position that may be written; what lies
    before belongs to blocks that the engine's prefix cache holds already. `profile`: digest of the profile that
    corrects what is generated, "" for none.
    """

    start: int
    end: int
    write_from: int
    segments: tuple[Segment, ...]
    num_cached: int
    profile: str = ""


@dataclass(frozen=True)
class StepPlan:
    """What the worker does for one request in one step.

    `block_ids`: the request's whole block table. `token_ids`: its whole text so far. `live`: ranges whose
    only source is the recomputation pass. `recompute`: the refined recomputation index set of this step, live
    ranges included, sorted and disjoint. `is_final`: the step reaches the last token, so it samples.
    """

    request_id: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    chunks: tuple[ChunkWork, ...]
    live: tuple[TokenRange, ...]
    recompute: tuple[TokenRange, ...]
    is_final: bool
    namespace: str = ""
    warm: bool = False
    attempt: int = 0
    """How often the request was preempted before this step."""
    calibration: int | None = None
    num_prompt_tokens: int | None = None
    """Length of the prompt in `token_ids`; what follows was generated before a preemption. None: all of it."""


@dataclass
class PlannedChunk:
    """One chunk of a request and how much of it the index says can be loaded."""

    start: int
    end: int
    live: bool
    segments: tuple[Segment, ...] = ()
    num_cached: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether the whole chunk can be loaded."""
        return not self.live and self.num_cached == len(self.segments)


@dataclass
class RequestPlan:
    """The scheduler's plan of one request; `token_ids` may have grown past the layout (resumed requests)."""

    request_id: str
    layout: ChunkLayout
    token_ids: tuple[int, ...]
    chunks: list[PlannedChunk]
    num_prefix_tokens: int = 0
    recompute: list[TokenRange] = field(default_factory=list)
    done: int = 0

    @classmethod
    def make(
        cls, request_id: str, layout: ChunkLayout, token_ids: Sequence[int], root: Callable[[str], bytes]
    ) -> RequestPlan:
        """Cut the chunks into segments; look-up results are filled in by `set_cached`.

        `root`: the root key of chunks with a profile.
        """
        tokens = tuple(token_ids)
        chunks = [
            PlannedChunk(
                start,
                end,
                live,
                () if live else segment_chain(root(layout.profile_of(start)), tokens[start:end]),
            )
            for (start, end), live in zip(layout.bounds, layout.live, strict=True)
            if start < end
        ]
        generated = chunks[-1].end
        if generated < len(tokens):
            # Tokens generated before a preemption are part of the last chunk, which is live from there on.
            if chunks[-1].live:
                chunks[-1].end = len(tokens)
            else:
                chunks.append(PlannedChunk(generated, len(tokens), live=True))
        return cls(request_id, layout, tokens, chunks)

    @property
    def num_tokens(self) -> int:
        """Length of the text to prefill, in tokens."""
        return len(self.token_ids)

    def chains(self) -> list[list[bytes]]:
        """The keys to look up, one chain per cached chunk, in order."""
        return [[segment.key for segment in chunk.segments] for chunk in self.chunks if not chunk.live]

    def set_cached(self, depths: Sequence[int]) -> None:
        """Store the index's answer to `chains`: leading segments that can be loaded."""
        cached = [chunk for chunk in self.chunks if not chunk.live]
        for chunk, depth in zip(cached, depths, strict=True):
            chunk.num_cached = depth

    def num_contiguous_hit_tokens(self, block_size: int) -> int:
        """L_cont: tokens of the unbroken prefix of loadable chunks, on a block boundary, never the whole prompt."""
        hit = 0
        for chunk in self.chunks:
            if not chunk.is_cached:
                break
            hit = chunk.end
        return min(hit, self.num_tokens - 1) // block_size * block_size

    def begin(self, num_prefix_tokens: int) -> None:
        """Fix the engine's prefix hit and refine the recomputation index set by it (paper §3.3.2)."""
        self.num_prefix_tokens = self.done = num_prefix_tokens
        self.recompute = refine(union(self.layout.recompute, self._live_ranges()), num_prefix_tokens)

    def skip_filled(self, num_filled: int) -> None:
        """Leave out what another request has filled in, in blocks that both hold; never the last token."""
        num_filled = min(num_filled, self.num_tokens - 1)
        if num_filled > self.done:
            self.done = self.num_prefix_tokens = num_filled
            self.recompute = refine(self.recompute, num_filled)

    def clip_to_prompt(self, start: int, end: int) -> int:
        """Tokens of `[start, end)` that are prompt: not text that was generated before a preemption."""
        num_prompt_tokens = self.layout.bounds[-1][1]
        return max(0, min(end, num_prompt_tokens) - min(start, num_prompt_tokens))

    def advance(self, num_covered: int, block_ids: Sequence[int], attempt: int = 0) -> StepPlan:
        """Plan the step after which the scheduler counts `num_covered` tokens as computed.

        `attempt`: how often the request was preempted before.
        """
        limit = self._completed_at(num_covered)
        window = (self.done, limit)
        chunks = tuple(
            ChunkWork(
                chunk.start,
                chunk.end,
                max(chunk.start, self.num_prefix_tokens),
                chunk.segments,
                chunk.num_cached,
                self.layout.profile_of(chunk.start),
            )
            for chunk in self.chunks
            if not chunk.live and self.done < chunk.end <= limit
        )
        step = StepPlan(
            request_id=self.request_id,
            token_ids=self.token_ids,
            block_ids=tuple(block_ids),
            chunks=chunks,
            live=tuple(clip(self._live_ranges(), window)),
            recompute=tuple(clip(self.recompute, window)),
            is_final=num_covered >= self.num_tokens,
            namespace=self.layout.namespace,
            warm=self.layout.warm,
            attempt=attempt,
            calibration=self.layout.calibration,
            num_prompt_tokens=self.layout.bounds[-1][1],
        )
        self.done = max(self.done, limit)
        return step

    def _live_ranges(self) -> list[TokenRange]:
        return [(chunk.start, chunk.end) for chunk in self.chunks if chunk.live]

    def _completed_at(self, num_covered: int) -> int:
        """The end of what can be finished once `num_covered` tokens have blocks."""
        for chunk in self.chunks:
            if num_covered < chunk.end:
                return num_covered if chunk.live else min(chunk.start, num_covered)
        return self.num_tokens


def clip(ranges: Sequence[TokenRange], window: TokenRange) -> list[TokenRange]:
    """The parts of sorted `ranges` inside `window`."""
    low, high = window
    return [(max(start, low), min(end, high)) for start, end in ranges if start < high and end > low]


def _check_bounds(bounds: tuple[TokenRange, ...], num_live: int, num_tokens: int, block_size: int) -> None:
    if not bounds or len(bounds) != num_live:
        raise ValueError(f"chunk layout has {len(bounds)} bounds and {num_live} live flags")
    position = 0
    for start, end in bounds:
        if start != position or end < start:
            raise ValueError(f"chunk bounds ({start}, {end}): expected a chunk that starts at {position}")
        if start % block_size:
            raise ValueError(f"chunk start {start} is not on a block boundary (block_size={block_size})")
        position = end
    if position != num_tokens:
        raise ValueError(f"chunk bounds end at {position}, the prompt has {num_tokens} tokens")
