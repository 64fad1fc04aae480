"""The correction of KV that was computed alone: a linear map per layer, fitted by `calibration`.

A document's KV deviates in context from what it is alone (DARIC Eq. 2-3). A good part of that deviation depends on
little but the KV itself, so it can be taken off once, when a chunk is stored, and costs nothing when it is loaded.
Keys are corrected without their positions: the map knows a token's content and how far into the chunk it stands.

    [ΔK; ΔV] = W [K; V] + b(bin of the offset)

KV heads are taken in groups of at most `GROUP_WIDTH` coordinates, each with a map of its own, so that its size and
the documents it needs stay bounded however many heads a model has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from daric_rag.engine.worker.rope import RopeParameters, delta_table, rotate

OFFSET_BINS = (1, 4, 16, 64)
"""Offsets in a chunk, in tokens, at which a new bin begins; the first bin begins at 0."""

GROUP_WIDTH = 256
"""Most key coordinates whose heads share a map."""


def num_groups(num_kv_heads: int, head_dim: int) -> int:
    """How many groups a layer's KV heads form: all equal, as few as `GROUP_WIDTH` allows."""
    fitting = (
        count
        for count in range(1, num_kv_heads + 1)
        if num_kv_heads % count == 0 and num_kv_heads // count * head_dim <= GROUP_WIDTH
    )
    return next(fitting, num_kv_heads)


@dataclass(frozen=True, eq=False)
class Positions:
    """Where tokens of chunks stand: `cos`, `sin` float32 `[num_tokens, rotary_dim // 2]` of the rotation in their
    keys, `bins` int64 `[num_tokens]` of their offsets.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    bins: torch.Tensor

    @classmethod
    def of(
        cls, encoded: torch.Tensor, offsets: torch.Tensor, rope: RopeParameters, device: torch.device
    ) -> Positions:
        """Keys hold the positions `encoded`, tokens stand at `offsets` of their chunks; both int64 `[num_tokens]`."""
        distinct, inverse = torch.unique(encoded, return_inverse=True)
        cos, sin = (table[inverse].to(device) for table in delta_table(rope, distinct.tolist()))
        bins = torch.bucketize(offsets, torch.tensor(OFFSET_BINS), right=True)
        return cls(cos, sin, bins.to(device))


def without_positions(keys_values: torch.Tensor, positions: Positions, rope: RopeParameters) -> torch.Tensor:
    """`[2 (K, V), num_tokens, heads, head_dim]` with the rotation taken out of the keys; a new tensor."""
    keys = rotate(keys_values[0], positions.cos, -positions.sin, rope.neox, rope.rotary_dim)
    return torch.stack((keys, keys_values[1]))


def grouped(keys_values: torch.Tensor, groups: int) -> torch.Tensor:
    """`[2, num_tokens, heads, head_dim]` as the features `[groups, num_tokens, 2 * width]` of each group's tokens."""
    two, tokens = keys_values.shape[:2]
    split = keys_values.reshape(two, tokens, groups, -1)
    return split.permute(2, 1, 0, 3).reshape(groups, tokens, -1)


def ungrouped(features: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of `grouped`."""
    groups, tokens, _ = features.shape
    split = features.reshape(groups, tokens, 2, -1).permute(2, 1, 0, 3)
    return split.reshape(2, tokens, -1, head_dim)


class Correction:
    """The maps of one rank; `maps` is what `to_tensors` gave.

    `weight` float32 `[layers, groups, 2 * width, 2 * width]` (from, to), `bias` float32
    `[layers, groups, bins, 2 * width]`, `corrected` bool `[layers]`: the others' KV stays.
    """

    def __init__(self, maps: Mapping[str, torch.Tensor], rope: RopeParameters, device: torch.device) -> None:
        self._weight, self._bias = maps["weight"].to(device), maps["bias"].to(device)
        self._corrected = [bool(flag) for flag in maps["corrected"]]
        self._rope = rope

    def is_for(self, num_layers: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether the maps have the shapes that these caches need."""
        groups = num_groups(num_kv_heads, head_dim)
        width = 2 * (num_kv_heads // groups) * head_dim
        return (
            self._weight.shape == (num_layers, groups, width, width)
            and self._bias.shape == (num_layers, groups, len(OFFSET_BINS) + 1, width)
            and len(self._corrected) == num_layers
        )

    def corrects(self, layer: int) -> bool:
        """Whether the layer's KV changes at all."""
        return self._corrected[layer]

    def apply(self, keys_values: torch.Tensor, positions: Positions, layer: int) -> None:
        """Correct float32 `[2 (K, V), num_tokens, heads, head_dim]`, keys with their positions, in place."""
        features = grouped(
            without_positions(keys_values, positions, self._rope), groups=self._weight.shape[1]
        )
        deviation = torch.baddbmm(self._bias[layer][:, positions.bins], features, self._weight[layer])
        keys, values = ungrouped(deviation, keys_values.shape[-1])
        keys_values[0] += rotate(keys, positions.cos, positions.sin, self._rope.neox, self._rope.rotary_dim)
        keys_values[1] += values
