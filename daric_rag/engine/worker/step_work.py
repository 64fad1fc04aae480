"""One step of reuse: where each chunk's KV comes from, and what is recomputed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import RequestReport
from daric_rag.engine.scheduling.plan import ChunkWork, StepPlan, clip
from daric_rag.engine.storage.base import ReadHandle
from daric_rag.engine.token_ranges import TokenRange, total, union
from daric_rag.engine.worker.load_or_generate import num_worth_loading
from daric_rag.engine.worker.passes import Generation, Recomputation

if TYPE_CHECKING:
    from daric_rag.engine.storage.store import KVStore

Agree = Callable[[Sequence[int]], Sequence[int]]
"""From one number per chunk on this rank to the smallest of all ranks'; the same call on every rank."""


@dataclass(frozen=True, eq=False)
class LoadedChunk:
    """A chunk whose KV comes from the store; `handles` are its pinned segments from `first_segment` on."""

    plan: StepPlan
    chunk: ChunkWork
    first_segment: int
    handles: tuple[ReadHandle, ...]

    @property
    def is_whole(self) -> bool:
        """Whether every segment that must be written is pinned."""
        return self.first_segment + len(self.handles) == len(self.chunk.segments)

    @property
    def can_be_generated(self) -> bool:
        """Not if its beginning lies in blocks of the engine's prefix cache, re-encoded already and perhaps shared."""
        return self.chunk.write_from == self.chunk.start

    def num_unread_bytes(self, num_layers: int) -> int:
        """Bytes of segments that are still being read from disk."""
        return sum(handle.data.nbytes for handle in self.handles if not handle.is_ready(num_layers - 1))

    def has_arrived(self, layer: int) -> bool:
        """Whether the bytes of `layer` are all in memory."""
        return all(handle.is_ready(layer) for handle in self.handles)


@dataclass
class StepWork:
    """The chunks of a step's plans, sorted; pins of what is loaded are held inside the `with` block.

    `loads`: chunks to load whole. `generations`: chunks to generate before anything is recomputed, of which
    `prefixes` have a beginning to load first. `repeats`: chunks that another request generates in this step.
    `live`: by request, the ranges whose only source is the recomputation phase. `tokens_per_s`: how fast chunks are
    generated, if that is known. `deadline`: when reads from disk are given up, in seconds of `time.monotonic()`.
    """

    plans: Sequence[StepPlan]
    store: KVStore
    num_layers: int
    agree: Agree
    tokens_per_s: float | None = None
    deadline: float | None = None
    loads: list[LoadedChunk] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    prefixes: list[LoadedChunk] = field(default_factory=list)
    repeats: list[LoadedChunk] = field(default_factory=list)
    live: dict[str, list[TokenRange]] = field(default_factory=dict)
    recomputations: list[Recomputation] = field(default_factory=list)
    reports: dict[str, RequestReport] = field(default_factory=dict)
    missing: list[SegmentKey] = field(default_factory=list)

    def __enter__(self) -> StepWork:
        for plan in self.plans:
            self.reports[plan.request_id] = RequestReport(plan.attempt)
            self.live[plan.request_id] = list(plan.live)
        self._sort([(plan, chunk) for plan in self.plans for chunk in plan.chunks])
        self._plan_recomputations()
        return self

    def __exit__(self, *exc: object) -> None:
        for loaded in (*self.loads, *self.prefixes):
            self._release(loaded.handles)

    def take_generations(self) -> list[Generation]:
        """The chunks that the next cache-generation phase computes."""
        generations, self.generations = self.generations, []
        return generations

    def load_repeats(self) -> None:
        """A cache-generation phase is over: what other requests wanted of it is loaded.

        What could not be stored is generated once more, in a further phase.
        """
        repeats, self.repeats = self.repeats, []
        self._sort([(loaded.plan, loaded.chunk) for loaded in repeats])

    def give_up(self, damaged: Sequence[LoadedChunk]) -> bool:
        """Generate chunks that a pass found damaged; True if there are any on a rank, and the pass must be repeated."""
        intact = self.agree([loaded not in damaged for loaded in self.loads])
        given_up = [loaded for loaded, is_intact in zip(self.loads, intact, strict=True) if not is_intact]
        for loaded in given_up:
            self.loads.remove(loaded)
            report = self.reports[loaded.plan.request_id]
            report.loaded_tokens -= loaded.chunk.end - loaded.chunk.write_from
            report.failed_segments += len(loaded.handles)
            self._release(loaded.handles)
            self._sort_chunk(replace(loaded, handles=()))
        if given_up:
            self._plan_recomputations()
        return bool(given_up)

    # ---- from plans to sources ----

    def _sort(self, wanted: Sequence[tuple[StepPlan, ChunkWork]]) -> None:
        """Decide, chunk by chunk, between load, generation and full context, for all ranks alike."""
        # All reads are under way before the first is waited for.
        found = self._agreed([self._acquire(plan, chunk) for plan, chunk in wanted])
        for one in found:
            self._count_failed(one, one.chunk.num_cached - one.first_segment)
        found = self._agreed(self._worth_loading([self._whole_if_corrected(one) for one in found]))
        # A warm request writes nothing, so nothing else would notice a damaged record; and a generation pass
        # needs its beginning before it starts.
        verified = self._agreed(
            [self._verified(one) if one.plan.warm or not one.is_whole else one for one in found]
        )
        for before, one in zip(found, verified, strict=True):
            self._count_failed(one, len(before.handles))
        for loaded in verified:
            self._sort_chunk(self._whole_if_corrected(loaded))

    def _whole_if_corrected(self, loaded: LoadedChunk) -> LoadedChunk:
        """A chunk's end cannot be generated behind a beginning that is corrected already: all of it, or nothing."""
        if loaded.chunk.profile and loaded.can_be_generated and not loaded.is_whole:
            return self._keep(loaded, 0)
        return loaded

    def _acquire(self, plan: StepPlan, chunk: ChunkWork) -> LoadedChunk:
        """Pin what the store has of the chunk, from the first segment that must be written on.

        The index may not know yet of a record that is there; one that it promised and that is not is reported.
        """
        first = next(
            (n for n, segment in enumerate(chunk.segments) if chunk.start + segment.end > chunk.write_from), 0
        )
        handles: list[ReadHandle] = []
        for number, segment in enumerate(chunk.segments[first:], first):
            if number >= chunk.num_cached and self.store.contains(segment.key) is None:
                break
            handle = self.store.acquire(segment.key)
            if handle is None:
                if self.store.contains(segment.key) is None:  # else there is no room for it now
                    self.missing.append(segment.key)
                break
            if handle.num_tokens != segment.num_tokens:
                self.store.release(handle)
                break
            handles.append(handle)
        return LoadedChunk(plan, chunk, first, tuple(handles))

    def _worth_loading(self, found: Sequence[LoadedChunk]) -> list[LoadedChunk]:
        """Leave chunks on a slow disk to be generated while others are read from it; later requests find them read."""
        bytes_per_s, tokens_per_s = self.store.read_bytes_per_s(), self.tokens_per_s
        if bytes_per_s is None or tokens_per_s is None:
            return list(found)
        unread = {one: one.num_unread_bytes(self.num_layers) for one in found}
        on_disk = [
            one
            for one in found
            if unread[one] and one.is_whole and one.can_be_generated and not one.plan.warm
        ]
        count = num_worth_loading(
            [unread[one] for one in on_disk],
            [one.chunk.end - one.chunk.start for one in on_disk],
            sum(
                one.chunk.end - one.chunk.start for one in found if not one.is_whole and one.can_be_generated
            ),
            bytes_per_s,
            tokens_per_s,
        )
        left = on_disk[count:]
        return [self._keep(one, 0) if one in left else one for one in found]

    def _verified(self, loaded: LoadedChunk) -> LoadedChunk:
        """Wait for the chunk's bytes; from the first damaged segment on its pins are given back."""
        for number, handle in enumerate(loaded.handles):
            if not all(handle.wait(layer, self.deadline) for layer in range(self.num_layers)):
                return self._keep(loaded, number)
        return loaded

    def _count_failed(self, loaded: LoadedChunk, num_promised: int) -> None:
        failed = max(0, num_promised - len(loaded.handles))
        self.reports[loaded.plan.request_id].failed_segments += failed

    def _agreed(self, found: Sequence[LoadedChunk]) -> list[LoadedChunk]:
        """Keep of every chunk the segments that all ranks have."""
        counts = self.agree([len(loaded.handles) for loaded in found])
        return [self._keep(loaded, count) for loaded, count in zip(found, counts, strict=True)]

    def _keep(self, loaded: LoadedChunk, count: int) -> LoadedChunk:
        if count == len(loaded.handles):
            return loaded
        self._release(loaded.handles[count:])
        return replace(loaded, handles=loaded.handles[:count])

    def _sort_chunk(self, loaded: LoadedChunk) -> None:
        plan, chunk, handles = loaded.plan, loaded.chunk, loaded.handles
        report = self.reports[plan.request_id]
        if loaded.can_be_generated and not loaded.is_whole and self._is_generated(chunk):
            self._release(handles)
            self.repeats.append(loaded)
            return
        if loaded.is_whole:
            self.loads.append(loaded)
            report.loaded_tokens += chunk.end - chunk.write_from
        elif not loaded.can_be_generated:
            self._release(handles)
            report.unstored.append((chunk.start, chunk.end))
            self.live[plan.request_id].append((chunk.write_from, chunk.end))
        else:
            num_loaded = chunk.segments[len(handles) - 1].end if handles else 0
            if handles:
                self.prefixes.append(loaded)
            self.generations.append(Generation(plan, chunk, num_loaded))
            report.loaded_tokens += num_loaded
            report.generated_tokens += chunk.end - chunk.start - num_loaded

    def _is_generated(self, chunk: ChunkWork) -> bool:
        """Whether the coming cache-generation phase computes these very tokens for another request."""
        key = chunk.segments[-1].key
        return any(other.chunk.segments[-1].key == key for other in self.generations)

    def _plan_recomputations(self) -> None:
        """What the partial-recomputation phase computes, from the plans and from what has become live."""
        self.recomputations.clear()
        for plan in self.plans:
            live, report = self.live[plan.request_id], self.reports[plan.request_id]
            ranges = union(plan.recompute, live)
            # Text generated before a preemption is computed again too, but is no part of the prompt.
            end = len(plan.token_ids) if plan.num_prompt_tokens is None else plan.num_prompt_tokens
            report.live_tokens = total(clip(union(live), (0, end)))
            report.recomputed_ranges = clip(ranges, (0, end))
            report.recomputed_tokens = total(report.recomputed_ranges)
            if ranges:
                self.recomputations.append(Recomputation(plan, tuple(ranges)))

    def _release(self, handles: Iterable[ReadHandle]) -> None:
        for handle in handles:
            self.store.release(handle)
