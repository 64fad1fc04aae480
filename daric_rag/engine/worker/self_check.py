"""The start-up check: a chunk computed alone and re-encoded must equal the same chunk inside a full prefill.

It is made where equality must hold to the last bits: in the first layer, whose keys and values depend on nothing
but a token and its position. Whether all layers rotate alike is read off the model (`rope_parameters_from_model`).
"""

from __future__ import annotations

from collections.abc import Callable

from daric_rag.engine.worker.passes import SubRequest
from daric_rag.engine.worker.worker_side import WorkerSide
from daric_rag.errors import UnsupportedModelError

# Block 0 is vLLM's own; before the first request all others are free, and nothing in them is trusted later.
_BLOCKS = (1, 2, 3)
_NEEDED_BLOCKS = 4
_FIRST_TOKEN = 11


def check_against_prefill(
    side: WorkerSide,
    run: Callable[[SubRequest], None],
    *,
    block_size: int,
    vocab_size: int,
    max_tokens: int,
) -> None:
    """Compute two blocks of tokens in one go, the second block once more alone, re-encode it, and compare.

    `run` computes a sub-request of at most `max_tokens` in a forward pass; an engine for which two blocks are too
    much, of tokens or of memory, is not checked. Must be called before the engine's first request. Raises
    `UnsupportedModelError` with the difference if it is larger than rounding explains.
    """
    if side.num_blocks < _NEEDED_BLOCKS or 2 * block_size > max_tokens:
        return
    tokens = tuple((_FIRST_TOKEN + 7 * number) % vocab_size for number in range(2 * block_size))
    first, second, alone = _BLOCKS
    run(SubRequest("", tokens, (first, second), 0, len(tokens)))
    run(SubRequest("", tokens[block_size:], (alone,), 0, block_size))
    difference, tolerance = side.reencoding_error(second, alone, block_size)
    if not difference <= tolerance:  # NaN is no pass either
        raise UnsupportedModelError(
            "KV reuse is not possible for this model: in the start-up check its re-encoded keys and values differ "
            f"from those of a full prefill by {difference:.1e} of their size (allowed: {tolerance:.0e})."
        )
