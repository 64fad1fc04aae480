"""Reading and writing KV in the blocks: by the kernels and by pure torch, against the blocks themselves."""

from __future__ import annotations

import pytest
import torch

from daric_rag.engine.worker.kv_layout import KVCaches, gpu_layout
from daric_rag.engine.worker.transfer import BlockRange, InPlace, kernels
from daric_rag.engine.worker.transfer import transfer as transfer_module

BLOCK, HEADS, WIDTH = 32, 2, 16
# Two block tables one after the other: blocks 3 and 1, then block 2.
TABLES = [3, 1, 2]
RANGES = [BlockRange(40, 8, 0), BlockRange(20, 4, 2)]


def blocks_of(cache: torch.Tensor) -> torch.Tensor:
    """The ranges' tokens, `[2 (K, V), 60, HEADS, WIDTH]`, picked out of the blocks one by one."""
    slots = [(TABLES[token // BLOCK], token % BLOCK) for token in range(8, 48)]
    slots += [(TABLES[2], token) for token in range(4, 24)]
    rows = torch.stack([cache[block, :, slot] for block, slot in slots])
    return torch.stack((rows[..., :WIDTH], rows[..., WIDTH:]))


@pytest.mark.parametrize("is_compiled", [True, False], ids=["kernels", "torch"])
def test_a_window_reads_and_writes_its_tokens_and_no_others(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        assert kernels.cpu_library() is not None, "the CPU kernels are not built: run `make build-ext`"
    else:
        monkeypatch.setattr(transfer_module, "cpu_library", lambda: None)
        monkeypatch.setattr(transfer_module, "_warn_once", lambda kind: None)
    generator = torch.Generator().manual_seed(5)
    layers = tuple(torch.randn(4, HEADS, BLOCK, 2 * WIDTH, generator=generator) for _ in range(2))
    window = InPlace(RANGES, TABLES, KVCaches(layers, gpu_layout(layers[0])))
    for number in (1, 0):
        cache = layers[number]
        before, expected = cache.clone(), blocks_of(cache)
        assert torch.equal(window.read(number), expected)
        window.keys_values.add_(1.0)
        window.write(number)
        assert torch.equal(blocks_of(cache), expected + 1.0)
        changed = (cache != before).any(-1).any(1)
        assert int(changed.sum()) == 60
