"""Which tokens of a reused prompt are recomputed: DARIC's Eq. 4 and Algorithm 1, and other strategies.

A strategy is any callable `(chunks, settings) -> ranges`; `register_strategy` adds one:

    register_strategy("half", lambda chunks, settings: [(start, (start + end) // 2) for start, end in chunks[1:]])
    DaricEngine(config=DaricConfig(selection="half"))
    engine.generate(prompt, selection="half")

Ranges are chosen in your process and travel with the request, so a strategy need not be known to vLLM's processes:
it may be a lambda, and it may come after the engine. `select` checks the chunks, sorts and merges what the strategy
returns, and adds the prompt's last token.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index

import numpy as np
from numpy.typing import NDArray

from daric_rag.engine.token_ranges import TokenRange, subtract, total, union

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

MAX_COMPENSATION_ROUNDS = 3  # Algorithm 1
# Absorbs the rounding of products such as 0.29 * 100, which is 28.999999999999996 in binary.
FLOOR_TOLERANCE = 1e-9

MTAFS: Mapping[str, Callable[[FloatArray], FloatArray]] = {
    "linear": lambda x: x,
    "log": np.log,
    # Divided by e^M, which cancels in Eq. 4, so that no number of chunks overflows.
    "exp": lambda x: np.exp(x - x[-1]),
}
"""The monotonic token allocation functions f, applied to the chunk numbers 2..M (last one M)."""


@dataclass(frozen=True)
class SelectionSettings:
    """How the recomputation index set I of a prompt is chosen.

    `strategy`: a name in `STRATEGIES`. `n_avg`: average recomputation budget per chunk, tokens. `ratio`: the
    r of n_2 = r * n_avg. `mtaf`: a name in `MTAFS`. `max_fraction`: the total budget is at most this fraction
    of the prompt's tokens (at least one token), paper section 5.2.5; None for no cap. `all` is not capped.
    `DaricConfig` checks them.
    """

    strategy: str = "daric"
    n_avg: int = 32
    ratio: float = 0.1
    mtaf: str = "linear"
    max_fraction: float | None = None


Strategy = Callable[[Sequence[TokenRange], SelectionSettings], Sequence[TokenRange]]
"""(non-empty contiguous chunks of the prompt, settings) -> ranges in any order, overlaps allowed."""


def allocate_budget(num_chunks: int, budget: int, ratio: float, mtaf: str) -> list[int]:
    """Return the M integers n_2, ..., n_M, n_l of Eq. 4: head tokens of chunks 2..M, then the local window.

    They add up to `budget` >= 1, which is M * n_avg in the paper and less under a cap; n_2..n_M never decrease,
    n_l >= n_M, and for the same n_avg n_i never grows as M grows (Proposition 1). Heads are rounded down; what
    rounding leaves over goes to n_l, the one number that Proposition 1 leaves free. M = 2 makes Eq. 4 singular:
    n_2 = n_l = n_avg. M = 1 has no heads, n_l = n_avg: nothing precedes the only chunk, its KV is exact wherever it
    comes from.
    """
    n_avg = budget / num_chunks
    if num_chunks <= 2:
        heads = [budget // num_chunks] * (num_chunks - 1)
        return [*heads, budget - sum(heads)]
    first = ratio * n_avg
    f = MTAFS[mtaf](np.arange(2, num_chunks + 1, dtype=np.float64))
    growth = (f - f[0]) / (f[-1] - f[0])  # from 0 at chunk 2 to 1 at chunk M
    # n_i = n_2 + (n_l - n_2) * growth_i, put into sum(n_i) + n_l = budget and solved for n_l - n_2.
    # The budget holds M shares of n_2 (M - 1 heads and the window) and, on top, the growth of each.
    rise = (budget - num_chunks * first) / (growth.sum() + 1)
    heads = [int(n) for n in np.floor(first + rise * growth + FLOOR_TOLERANCE)]
    return [*heads, budget - sum(heads)]


def register_strategy(name: str, strategy: Strategy) -> None:
    """Let `strategy` be selected by `name` in `DaricConfig` and in every call, from now on.

    `strategy` gets the chunks of a prompt, contiguous `[start, end)` token ranges none of which is empty, and the
    `SelectionSettings`, and returns the ranges to recompute in any order, overlaps allowed; what lies outside the
    prompt is cut off. If it raises, or returns anything but pairs of integers, the prompt is computed in full
    context, with a warning. A name of one's own may be registered again. It may be called from any thread.

    Raises `ValueError` for a name that is not a text or belongs to daric_rag, and for what cannot be called.
    """
    if not isinstance(name, str) or not name or name in _OWN_STRATEGIES:
        taken = ", ".join(sorted(_OWN_STRATEGIES))
        raise ValueError(f"name is {name!r}; allowed: a text other than '' and daric_rag's own {taken}")
    if not callable(strategy):
        raise ValueError(f"strategy is {strategy!r}; allowed: a callable (chunks, settings) -> ranges")
    STRATEGIES[name] = strategy


def recomputed(chunk_bounds: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """Return what `select` chooses without the first chunk, whose own KV is exact at position 0; `all` keeps it."""
    chosen = select(chunk_bounds, settings)
    if settings.strategy == "all":
        return chosen
    first_end = next(end for start, end in chunk_bounds if start < end)
    return subtract(chosen, [(0, min(first_end, chunk_bounds[-1][1] - 1))])


def select(chunk_bounds: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """Return the recomputation index set I of a prompt as sorted, disjoint, non-empty ranges.

    `chunk_bounds`: the prompt's chunks in order, contiguous, the first starting at 0; empty ones are passed
    over. The last token is always in I, because its logits start the answer. The first chunk needs no
    recomputation (it stands where its KV was computed), so only the local window at the end of the prompt can
    reach it. |I| is at most M * n_avg for every strategy but `all`.

    Raises ValueError for an empty prompt and for chunks that are not contiguous.
    """
    chunks = _checked_chunks(chunk_bounds)
    num_tokens = chunks[-1][1]
    try:
        chosen = [
            (index(start), index(end)) for start, end in STRATEGIES[settings.strategy](chunks, settings)
        ]
    except Exception as error:  # whatever a registered strategy raises
        logger.warning(
            "selection strategy %r failed, so the prompt is computed in full context: %r",
            settings.strategy,
            error,
        )
        chosen = select_all(chunks, settings)
    inside = [(max(start, 0), min(end, num_tokens)) for start, end in chosen]
    return union(inside, [(num_tokens - 1, num_tokens)])


def select_daric(chunks: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """Algorithm 1: heads of chunks 2..M by Eq. 4 and the last n_l tokens, merged.

    Tokens lost to overlaps, or to chunks shorter than their head, are given back to the front of the last
    range, which may make it meet another head: hence the rounds.
    """
    budget = _token_budget(chunks, settings)
    *head_sizes, window = allocate_budget(len(chunks), budget, settings.ratio, settings.mtaf)
    num_tokens = chunks[-1][1]
    ranges = union(_heads(chunks, head_sizes), [(max(num_tokens - window, 0), num_tokens)])
    for _ in range(MAX_COMPENSATION_ROUNDS):
        lost = budget - total(ranges)
        if lost == 0 or ranges[-1][0] == 0:
            break
        start, end = ranges[-1]
        ranges = union(ranges, [(max(start - lost, 0), end)])
    return ranges


def select_epic(chunks: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """The first n_avg tokens of every chunk but the first, as EPIC does (fewer under the cap)."""
    if len(chunks) == 1:
        return []
    # One token is set aside for the prompt's last one, which is computed in any case.
    size = min(settings.n_avg, (_token_budget(chunks, settings) - 1) // (len(chunks) - 1))
    return _heads(chunks, [size] * (len(chunks) - 1))


def select_none(chunks: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """Full reuse: nothing but the last token, which `select` adds."""
    return []


def select_all(chunks: Sequence[TokenRange], settings: SelectionSettings) -> list[TokenRange]:
    """Recompute the whole prompt: the exact reference, equal to a plain prefill."""
    return [(0, chunks[-1][1])]


STRATEGIES: dict[str, Strategy] = {
    "daric": select_daric,
    "epic": select_epic,
    "none": select_none,
    "all": select_all,
}
"""Every strategy by its name; `register_strategy` adds to it."""

_OWN_STRATEGIES = frozenset(STRATEGIES)


def _heads(chunks: Sequence[TokenRange], sizes: Sequence[int]) -> list[TokenRange]:
    """The first sizes[k] tokens of chunk k + 2 (counting from 1), cut at the chunk's end."""
    return [(start, min(start + n, end)) for (start, end), n in zip(chunks[1:], sizes, strict=True)]


def _token_budget(chunks: Sequence[TokenRange], settings: SelectionSettings) -> int:
    """M * n_avg tokens, or the cap if that is less; at least the one token that must be computed."""
    budget = len(chunks) * settings.n_avg
    if settings.max_fraction is None:
        return budget
    return max(1, min(budget, math.floor(settings.max_fraction * chunks[-1][1] + FLOOR_TOLERANCE)))


def _checked_chunks(chunk_bounds: Sequence[TokenRange]) -> list[TokenRange]:
    position = 0
    for number, (start, end) in enumerate(chunk_bounds, start=1):
        if start != position or end < start:
            raise ValueError(
                f"chunk_bounds has ({start}, {end}) as chunk {number}; "
                f"allowed: contiguous chunks, here one that starts at {position} and does not end before it"
            )
        position = end
    if position == 0:
        raise ValueError(f"chunk_bounds is {list(chunk_bounds)!r}; allowed: a prompt of at least 1 token")
    return [bounds for bounds in chunk_bounds if bounds[0] < bounds[1]]
