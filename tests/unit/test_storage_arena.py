"""Cutting an arena into records."""

import resource

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.storage.arena import ALIGNMENT, Arena, FreeList, aligned
from daric_rag.errors import CacheUnavailableError

UNITS = 64


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12 * ALIGNMENT)), max_size=80))
def test_free_list_against_a_bitmap(steps: list[tuple[bool, int]]) -> None:
    free = FreeList(UNITS * ALIGNMENT + 7)
    taken = np.zeros(UNITS, dtype=bool)
    live: list[tuple[int, int]] = []
    for give_back, nbytes in steps:
        if give_back and live:
            start, size = live.pop(nbytes % len(live))
            free.release(start, size)
            taken[start // ALIGNMENT : (start + aligned(size)) // ALIGNMENT] = False
            continue
        units = aligned(nbytes) // ALIGNMENT
        holes = [first for first in range(UNITS - units + 1) if not taken[first : first + units].any()]
        start_found = free.allocate(nbytes)
        assert start_found == (holes[0] * ALIGNMENT if holes else None)
        if start_found is not None:
            taken[start_found // ALIGNMENT : start_found // ALIGNMENT + units] = True
            live.append((start_found, nbytes))
        assert free.free_bytes == (UNITS - taken.sum()) * ALIGNMENT
    for start, size in live:
        free.release(start, size)
    assert free.allocate(UNITS * ALIGNMENT) == 0


def test_untouched_arena_costs_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arena = Arena(32 << 30)
    arena.view(0, 1 << 16)[:] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_views_are_aligned_and_survive_close() -> None:
    arena = Arena(1 << 16)
    view = arena.view(128, 64)
    assert view.ctypes.data % ALIGNMENT == 0
    view[:] = 7
    arena.close()
    assert view.sum() == 7 * 64


def test_pinning_without_cuda_is_refused() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        Arena(1 << 20, pin_memory=True).close()
        return
    with pytest.raises(CacheUnavailableError, match="pin_memory"):
        Arena(1 << 20, pin_memory=True)


def test_impossible_size_is_an_error_with_the_number() -> None:
    with pytest.raises(CacheUnavailableError, match="host_bytes"):
        Arena(1 << 62)
