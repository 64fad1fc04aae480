"""Fitting the correction: planted deviations are found again, and what has none is left alone."""

from __future__ import annotations

import numpy as np
import torch

from daric_rag.engine.worker.calibration import NUM_PARTS, Moments, fit_layer
from daric_rag.engine.worker.correction import (
    OFFSET_BINS,
    Correction,
    Positions,
    grouped,
    num_groups,
    ungrouped,
    without_positions,
)
from daric_rag.engine.worker.rope import RopeParameters, delta_table, rotate

ROPE = RopeParameters(1.0 / 100 ** (np.arange(4, dtype=np.float64) / 4), 8, 8, True, 1.0)
HEADS, WIDTH = 2, 16


def tokens(seed: int, count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Features `[1, count, 2 * WIDTH]` of tokens, and their bins."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, count, 2 * WIDTH, generator=generator), torch.arange(count) % (len(OFFSET_BINS) + 1)


def parts_with(deviation_of: object, noise: float) -> list[Moments]:
    parts = []
    for seed in range(NUM_PARTS):
        alone, bins = tokens(seed)
        moments = Moments(1, WIDTH)
        noisy = noise * torch.randn(alone.shape, generator=torch.Generator().manual_seed(100 + seed))
        moments.add(alone, deviation_of(alone, bins) + noisy, bins)  # type: ignore[operator]
        parts.append(moments)
    return parts


def test_a_planted_linear_deviation_is_recovered() -> None:
    planted = 0.3 * torch.randn(2 * WIDTH, 2 * WIDTH, generator=torch.Generator().manual_seed(7))
    shift = torch.randn(len(OFFSET_BINS) + 1, 2 * WIDTH, generator=torch.Generator().manual_seed(8))
    fit = fit_layer(parts_with(lambda x, bins: x @ planted + shift[bins], noise=0.01))
    assert fit.gain.key_gain > 0.95 and fit.gain.value_gain > 0.95
    alone, bins = tokens(99)
    found = fit.kept().float()
    predicted = alone @ found[0, : 2 * WIDTH] + found[0, 2 * WIDTH :][bins]
    expected = alone @ planted + shift[bins]
    assert (predicted - expected).square().mean() < 0.05 * expected.square().mean()


def test_a_deviation_that_depends_on_nothing_known_is_not_corrected() -> None:
    fit = fit_layer(parts_with(lambda x, bins: torch.zeros_like(x), noise=1.0))
    assert not fit.kept().any()


def test_no_deviation_is_not_corrected() -> None:
    fit = fit_layer(parts_with(lambda x, bins: torch.zeros_like(x), noise=0.0))
    assert (fit.gain.key_gain, fit.gain.value_gain) == (0.0, 0.0)
    assert not fit.kept().any()


def test_only_values_are_corrected_where_only_they_gain() -> None:
    def values_only(alone: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
        return torch.cat((torch.zeros_like(alone[..., :WIDTH]), alone[..., :WIDTH]), -1)

    kept = fit_layer(parts_with(values_only, noise=0.05)).kept()
    assert not kept[..., :WIDTH].any()
    assert kept[..., WIDTH:].any()


def test_the_correction_sees_keys_without_positions() -> None:
    """Keys 'rotated' to where they stand come back as the corrected key, rotated to the same place."""
    count = 70
    offsets = torch.arange(count)
    generator = torch.Generator().manual_seed(3)
    still = torch.randn(2, count, HEADS, 8, generator=generator)
    positions = Positions.of(offsets, offsets, ROPE, torch.device("cpu"))
    cos, sin = delta_table(ROPE, offsets.tolist())
    placed = torch.stack((rotate(still[0], cos, sin, True, 8), still[1]))
    weight = 0.1 * torch.randn(1, 1, 2 * WIDTH, 2 * WIDTH, generator=generator)
    bias = torch.randn(1, 1, len(OFFSET_BINS) + 1, 2 * WIDTH, generator=generator)
    maps = {"weight": weight, "bias": bias, "corrected": torch.tensor([True])}
    correction = Correction(maps, ROPE, torch.device("cpu"))
    assert correction.is_for(1, HEADS, 8)
    assert not correction.is_for(2, HEADS, 8)
    expected = still + ungrouped(grouped(still, 1) @ weight[0] + bias[0][:, positions.bins], 8)
    correction.apply(placed, positions, 0)
    assert torch.allclose(without_positions(placed, positions, ROPE), expected, atol=1e-4)


def test_heads_form_as_few_equal_groups_as_the_width_allows() -> None:
    assert num_groups(3, 64) == 1
    assert num_groups(8, 128) == 4
    assert num_groups(6, 128) == 3
    assert num_groups(5, 300) == 5
