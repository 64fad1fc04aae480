"""Algebra on sets of token positions, kept as sorted disjoint half-open ranges."""

from collections.abc import Iterable, Sequence

TokenRange = tuple[int, int]
"""`[start, end)`: absolute token positions in the prompt."""


def union(*range_lists: Iterable[TokenRange]) -> list[TokenRange]:
    """Return the positions of any of the lists as sorted, disjoint, non-empty ranges; neighbours are merged.

    The lists may be unsorted, overlap, and contain empty ranges.
    """
    merged: list[TokenRange] = []
    for start, end in sorted(r for ranges in range_lists for r in ranges if r[0] < r[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(ranges: Iterable[TokenRange], removed: Iterable[TokenRange]) -> list[TokenRange]:
    """Return the positions of `ranges` that are not in `removed`, as sorted disjoint non-empty ranges."""
    cuts = union(removed)
    kept: list[TokenRange] = []
    first = 0  # cuts before this one end at or before every range still to come
    for start, end in union(ranges):
        while first < len(cuts) and cuts[first][1] <= start:
            first += 1
        index = first
        while index < len(cuts) and cuts[index][0] < end:
            if start < cuts[index][0]:
                kept.append((start, cuts[index][0]))
            start = cuts[index][1]
            index += 1
        if start < end:
            kept.append((start, end))
    return kept


def total(ranges: Sequence[TokenRange]) -> int:
    """Return the number of tokens in disjoint ranges."""
    return sum(end - start for start, end in ranges)


def refine(ranges: Iterable[TokenRange], num_hit_tokens: int) -> list[TokenRange]:
    """Drop the tokens that the engine's own prefix hit already covers: positions below `num_hit_tokens`.

    Refinement of DARIC: their KV was computed in full context, so recomputing them gains nothing.
    """
    if num_hit_tokens < 0:
        raise ValueError(f"num_hit_tokens is {num_hit_tokens}; allowed: an integer of at least 0")
    return union((max(start, num_hit_tokens), end) for start, end in ranges)
