"""The start-up check passes a model that rotates as we do, and refuses one that does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from daric_rag.engine.worker.layer_hooks import LayerHooks
from daric_rag.engine.worker.passes import Row
from daric_rag.engine.worker.rope import RopeParameters, delta_table, rotate
from daric_rag.engine.worker.self_check import check_against_prefill
from daric_rag.errors import UnsupportedModelError

BLOCK, HEADS, DIM, VOCABULARY = 32, 2, 32, 500
ROPE = RopeParameters(10_000.0 ** -(np.arange(0, DIM, 2) / DIM), DIM, DIM, True, 1.0)


class FirstLayer:
    """Keys and values of a first layer: of a token, the keys turned to its position."""

    def __init__(self, rope: RopeParameters, num_blocks: int = 6) -> None:
        draw = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, VOCABULARY, HEADS, DIM, generator=draw)
        self.rope = rope
        self.rows: list[Row] = []
        self.cache = torch.full((num_blocks, HEADS, BLOCK, 2 * DIM), torch.nan)
        self.hooks = LayerHooks({"model.layers.0.attn": self.cache}, torch.float32)
        self.hooks.set_rope(ROPE)

    def run(self, row: Row) -> None:
        self.rows.append(row)
        layout = self.hooks.caches.layout
        tokens = torch.tensor(row.token_ids)
        keys = rotate(
            self.keys[tokens],
            *delta_table(self.rope, range(len(tokens))),
            self.rope.neox,
            self.rope.rotary_dim,
        )
        for number, block in enumerate(row.block_ids):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            for head in range(HEADS):
                area = self.cache[block, head].view(-1)
                area[layout.key_order.long()] = keys[part, head].reshape(-1)
                values = self.values[tokens[part], head].reshape(-1)
                area[layout.value_offset + layout.value_order.long()] = values

    def check(self, max_tokens: int = 8192) -> None:
        check_against_prefill(
            self.hooks, self.run, block_size=BLOCK, vocab_size=VOCABULARY, max_tokens=max_tokens
        )


def test_a_model_that_turns_its_keys_as_we_do_passes() -> None:
    layer = FirstLayer(ROPE)
    layer.check()
    assert [len(row.token_ids) for row in layer.rows] == [2 * BLOCK, BLOCK]


@pytest.mark.parametrize(
    "change",
    [
        {"inv_freq": ROPE.inv_freq * 1.01},
        {"neox": False},
        {"rotary_dim": DIM // 2, "inv_freq": ROPE.inv_freq[: DIM // 4]},
        {"inv_freq": np.zeros(DIM // 2)},
    ],
)
def test_a_model_that_turns_them_otherwise_is_refused(change: dict[str, object]) -> None:
    layer = FirstLayer(dataclasses.replace(ROPE, **change))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=r"differ .* full prefill by .* \(allowed: 1e-03\)"):
        layer.check()


def test_values_that_depend_on_the_position_are_refused() -> None:
    layer = FirstLayer(ROPE)
    compute = layer.run

    def run(row: Row) -> None:
        compute(row)
        layer.values = layer.values + 0.1

    layer.run = run  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="full prefill"):
        layer.check()


def test_not_a_number_is_no_pass() -> None:
    layer = FirstLayer(ROPE)
    layer.run = layer.rows.append  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModelError, match="by nan of their size"):
        layer.check()


@pytest.mark.parametrize(("num_blocks", "max_tokens"), [(3, 8192), (6, 2 * BLOCK - 1)])
def test_an_engine_too_small_for_it_is_not_checked(num_blocks: int, max_tokens: int) -> None:
    layer = FirstLayer(ROPE, num_blocks)
    layer.check(max_tokens)
    assert layer.rows == []
