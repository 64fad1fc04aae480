"""Ranks whose stores differ cut a step into the same passes, whatever each of them lacks and finds damaged."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from daric_rag.engine.keys import Segment
from daric_rag.engine.scheduling.plan import ChunkWork, StepPlan
from daric_rag.engine.storage import KVStore
from daric_rag.engine.worker.step_work import LoadedChunk, StepWork
from tests.storage_support import SPEC, key_of, open_store, record_files, save

NUM_RANKS = 2
TOKENS = 16
SEGMENTS = 2
DOCUMENTS = 3
KEYS = [key_of(number) for number in range(DOCUMENTS * SEGMENTS)]

STORED = st.fixed_dictionaries(
    {key: st.sampled_from(["absent", "in memory", "on disk", "damaged"]) for key in KEYS}
)
# A chunk: which document, how many of its segments the index promises, whether a block of it is a prefix hit.
CHUNK = st.tuples(st.integers(0, DOCUMENTS - 1), st.integers(0, SEGMENTS), st.booleans())
REQUEST = st.tuples(st.lists(CHUNK, min_size=1, max_size=3), st.booleans())


class Meeting:
    """Stands for the collective: it fails if a rank asks for something else, or never asks."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUM_RANKS, timeout=5)
        self._counts: dict[int, Sequence[int]] = {}

    def seat(self, rank: int) -> Callable[[Sequence[int]], Sequence[int]]:
        def least(counts: Sequence[int]) -> Sequence[int]:
            self._counts[rank] = counts
            self._barrier.wait()
            result = [min(values) for values in zip(*self._counts.values(), strict=True)]
            self._barrier.wait()
            return result

        return least


@settings(max_examples=25)
@given(st.lists(STORED, min_size=NUM_RANKS, max_size=NUM_RANKS), st.lists(REQUEST, min_size=1, max_size=2))
def test_all_ranks_do_the_same(stored: list[dict[bytes, str]], requests: list[Any]) -> None:
    plans = [plan(f"request {number}", *request) for number, request in enumerate(requests)]
    meeting = Meeting()
    with tempfile.TemporaryDirectory() as path, ThreadPoolExecutor(NUM_RANKS) as threads:
        stores = [fill(Path(path) / str(rank), states) for rank, states in enumerate(stored)]

        def run(rank: int) -> list[object]:
            return passes(StepWork(plans, stores[rank], SPEC.num_layers, meeting.seat(rank)))

        try:
            first, *others = list(threads.map(run, range(NUM_RANKS)))
            assert all(other == first for other in others)
            assert all(store.stats().pins == 0 for store in stores)
        finally:
            for store in stores:
                store.close()


def plan(request_id: str, chunks: list[tuple[int, int, bool]], warm: bool) -> StepPlan:
    works = []
    for number, (document, num_cached, has_prefix) in enumerate(chunks):
        start = number * SEGMENTS * TOKENS
        keys = KEYS[document * SEGMENTS : (document + 1) * SEGMENTS]
        segments = tuple(
            Segment(key=key, parent=b"", start=place * TOKENS, end=(place + 1) * TOKENS)
            for place, key in enumerate(keys)
        )
        write_from = start + TOKENS if has_prefix and number == 0 else start
        works.append(ChunkWork(start, start + SEGMENTS * TOKENS, write_from, segments, num_cached))
    end = works[-1].end
    return StepPlan(
        request_id,
        token_ids=tuple(range(end + 1)),
        block_ids=tuple(range(end // TOKENS + 1)),
        chunks=tuple(works),
        live=((end, end + 1),),
        recompute=((end, end + 1),),
        is_final=True,
        warm=warm,
    )


def fill(path: Path, states: dict[bytes, str]) -> KVStore:
    """A store with records in these states."""
    before = open_store(path, records=20)
    for key, state in states.items():
        if state in ("on disk", "damaged"):
            save(before, key)
    assert before.flush(20)
    before.close()
    for file in record_files(path):
        if states[bytes.fromhex(file.stem)] == "damaged":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    store = open_store(path, records=20)
    for key, state in states.items():
        if state == "in memory":
            save(store, key)
    return store


def passes(work: StepWork) -> list[object]:
    """What a rank does in a step, with stores in the place of a model."""
    done: list[object] = []
    with work:
        while True:
            while work.generations:
                for one in work.take_generations():
                    done.append(("generate", one.plan.request_id, one.chunk.start, one.num_loaded))
                    for segment in one.chunk.segments:
                        if segment.end > one.num_loaded:
                            save(work.store, segment.key)
                work.load_repeats()
            done.append([(item.plan.request_id, item.ranges) for item in work.recomputations])
            done.append([(loaded.plan.request_id, loaded.chunk.start) for loaded in work.loads])
            if not work.give_up([loaded for loaded in work.loads if not has_arrived(loaded)]):
                break
    done.append(work.reports)
    return done


def has_arrived(loaded: LoadedChunk) -> bool:
    return all([handle.wait(layer) for handle in loaded.handles for layer in range(SPEC.num_layers)])
