"""Whether a chunk on disk is read or computed anew: whichever ends the step's first phase sooner. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

MIN_GAIN_S = 0.1
"""Estimates are rough, and a chunk that is read leaves the processor to others: less is not worth generating for."""


def num_worth_loading(
    nbytes: Sequence[int],
    num_tokens: Sequence[int],
    num_generated_tokens: int,
    bytes_per_s: float,
    tokens_per_s: float,
) -> int:
    """How many of a step's chunks, from the first, to read; the others are generated while those are read.

    `nbytes`, `num_tokens`: per chunk what is to be read, and what there would be to generate.
    `num_generated_tokens`: what the step generates in any case. Reading and generating go on beside each other, so
    the phase takes as long as the longer of the two. All are read unless `MIN_GAIN_S` are gained, and as many as can be
    without loss.
    """
    read_s = [amount / max(bytes_per_s, 1e-9) for amount in accumulate(nbytes, initial=0)]
    left = [num_generated_tokens + sum(num_tokens) - done for done in accumulate(num_tokens, initial=0)]
    phase_s = [max(reading, tokens / tokens_per_s) for reading, tokens in zip(read_s, left, strict=True)]
    shortest = min(phase_s)
    if phase_s[-1] - shortest < MIN_GAIN_S:
        return len(nbytes)
    return max(number for number, seconds in enumerate(phase_s) if seconds <= shortest)


class Rate:
    """Units a second over the last few measurements, later ones weighing more."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """`amount` units took `seconds`."""
        self._amount = self._amount / 2 + amount
        self._seconds = self._seconds / 2 + seconds

    def value(self) -> float | None:
        """The rate; None before the first measurement."""
        return self._amount / self._seconds if self._seconds > 0 else None
