"""The start-up check: a chunk computed alone and re-encoded must equal the same chunk inside a full prefill.

It is made where equality must hold to the last bits: in the first layer, whose keys and values depend on nothing
but a token and its position. Whether all layers rotate alike is read off the model (`rope_parameters_from_model`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from daric_rag.engine.worker.layer_hooks import LayerHooks
from daric_rag.engine.worker.passes import Row
from daric_rag.engine.worker.transfer import NO_RECORD, Kind, TransferRange
from daric_rag.errors import UnsupportedModelError

# Block 0 is vLLM's own; before the first request all others are free, and nothing in them is trusted later.
_BLOCKS = (1, 2, 3)
_NEEDED_BLOCKS = 4
_FIRST_TOKEN = 11


def check_against_prefill(
    hooks: LayerHooks,
    run: Callable[[Row], None],
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
    if hooks.caches.num_blocks < _NEEDED_BLOCKS or 2 * block_size > max_tokens:
        return
    tokens = tuple((_FIRST_TOKEN + 7 * number) % vocab_size for number in range(2 * block_size))
    first, second, alone = _BLOCKS
    run(Row("", tokens, (first, second), 0, len(tokens)))
    run(Row("", tokens[block_size:], (alone,), 0, block_size))
    difference, tolerance = _reencoding_error(hooks, second, alone, block_size)
    if not difference <= tolerance:  # NaN is no pass either
        raise UnsupportedModelError(
            "KV reuse is not possible for this model: in the start-up check its re-encoded keys and values differ "
            f"from those of a full prefill by {difference:.1e} of their size (allowed: {tolerance:.0e})."
        )


def _reencoding_error(hooks: LayerHooks, block: int, alone: int, num_tokens: int) -> tuple[float, float]:
    """Re-encode block `alone` by `num_tokens` positions and compare its first layer with that of `block`.

    Returns the largest difference of keys or values, as a share of the largest of them, and what rounding in
    the dtypes of engine and store explains.
    """
    caches, layout = hooks.caches, hooks.caches.layout
    rotate, gather = hooks.builder(), hooks.builder()
    rotate.block_tables = [alone]
    rotate.ranges = [TransferRange(NO_RECORD, 0, 0, num_tokens, 0, 0, rotate.rope_row(num_tokens))]
    gather.block_tables = [block, alone]
    shape = (2, hooks.num_layers, 2, num_tokens, layout.num_kv_heads, layout.head_dim)
    records = torch.zeros(shape, dtype=hooks.dtype)
    gather.ranges = [
        TransferRange(record.data_ptr(), num_tokens, 0, num_tokens, 0, offset)
        for offset, record in enumerate(records)
    ]
    for transfer in (rotate.build(Kind.ROTATE), gather.build(Kind.GATHER)):
        assert transfer is not None
        transfer.run(0)
    torch.get_device_module(caches.device).synchronize()
    inside, moved = records[:, 0].float()
    size = inside.flatten(1).abs().amax(1)
    difference = ((inside - moved).flatten(1).abs().amax(1) / size).max()
    exact = hooks.dtype == layout.dtype == torch.float32
    return float(difference), 1e-3 if exact else 3e-2
