"""Fitting the correction of stored KV: ridge regressions from KV computed alone to its deviation in context.

A calibration request is a cold request that recomputes everything: its documents are generated alone, then the
whole prompt is computed in full context, all in blocks of its own. Both are watched here, layer by layer, and leave
nothing but sums (normal equations, float64). Requests belong to parts; every part is held back once, which decides
how much to regularise, what each layer gains, and which layers gain too little to be touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from daric_rag.engine.profile import NUM_PARTS, LayerGain
from daric_rag.engine.token_ranges import TokenRange, subtract, union
from daric_rag.engine.worker.correction import (
    OFFSET_BINS,
    Positions,
    grouped,
    num_groups,
    without_positions,
)
from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.rope import RopeParameters

# Of each feature's own sum of squares: keys and values have very different sizes, and documents of another kind than
# the fitted ones gained more so (23 % of the keys' deviation explained instead of 21 %). The smallest is no less than
# what served other kinds best: held-back documents are of the same kind as the others, and would choose less.
_RIDGES = (1e-1, 3e-1, 1.0)


class Moments:
    """Sums over tokens for one part and layer: all that a ridge regression needs, float64 on the host.

    `xx` `[groups, features, features]`, `xy` `[groups, features, 2 * width]`, `yy` `[groups, 2 * width]`;
    features are a group's [K; V] and one indicator a bin of the offset.
    """

    def __init__(self, groups: int, width: int) -> None:
        features = 2 * width + len(OFFSET_BINS) + 1
        self.num_tokens = 0
        self.xx = torch.zeros(groups, features, features, dtype=torch.float64)
        self.xy = torch.zeros(groups, features, 2 * width, dtype=torch.float64)
        self.yy = torch.zeros(groups, 2 * width, dtype=torch.float64)

    def add(self, alone: torch.Tensor, deviation: torch.Tensor, bins: torch.Tensor) -> None:
        """Add tokens: features alone and deviation `[groups, num_tokens, 2 * width]`, `bins` `[num_tokens]`."""
        indicators = torch.nn.functional.one_hot(bins, len(OFFSET_BINS) + 1).to(alone)
        x = torch.cat((alone, indicators.expand(len(alone), -1, -1)), -1).double()
        y = deviation.double()
        self.num_tokens += x.shape[1]
        self.xx += (x.mT @ x).cpu()
        self.xy += (x.mT @ y).cpu()
        self.yy += y.square().sum(1).cpu()

    def plus(self, other: Moments, sign: int = 1) -> Moments:
        """The sums of both; with `sign` -1 without the other's."""
        result = Moments.__new__(Moments)
        result.num_tokens = self.num_tokens + sign * other.num_tokens
        result.xx, result.xy, result.yy = (
            mine + sign * theirs
            for mine, theirs in ((self.xx, other.xx), (self.xy, other.xy), (self.yy, other.yy))
        )
        return result

    def solve(self, ridge: float) -> torch.Tensor:
        """The map `[groups, features, 2 * width]` that minimises the squared error plus the ridge's penalty."""
        sizes = self.xx.diagonal(dim1=1, dim2=2)
        # A feature that is always 0 (a bin that no token is in) gets the coefficient 0.
        floor = 1e-6 * sizes.mean(1, keepdim=True) + torch.finfo(torch.float64).tiny
        solution: torch.Tensor = torch.linalg.solve(
            self.xx + torch.diag_embed(ridge * sizes + floor), self.xy
        )
        return solution

    def unexplained(self, solution: torch.Tensor) -> torch.Tensor:
        """What a map leaves of `yy`, `[groups, 2 * width]`."""
        fitted = (solution * (self.xx @ solution - 2 * self.xy)).sum(1)
        return self.yy + fitted


@dataclass(frozen=True, eq=False)
class Fit:
    """The result for one layer: its map, and what it explains of what was held back."""

    solution: torch.Tensor
    gain: LayerGain

    def kept(self) -> torch.Tensor:
        """The map without what gains too little: zero columns leave keys, or values, as they are."""
        width = self.solution.shape[-1] // 2
        worth = torch.tensor([self.gain.corrects_keys, self.gain.corrects_values])
        return self.solution * worth.repeat_interleave(width)


def fit_layer(parts: list[Moments]) -> Fit:
    """Choose the ridge on what is held back, one part at a time, then fit all parts together."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.plus(part)
    total = whole.yy.reshape(len(whole.yy), 2, -1).sum((0, 2))
    others = [whole.plus(part, -1) for part in parts]
    best: tuple[float, torch.Tensor, float] | None = None
    for ridge in _RIDGES:
        left = sum(
            (part.unexplained(rest.solve(ridge)) for part, rest in zip(parts, others, strict=True)),
            start=torch.zeros_like(whole.yy),
        )
        left = left.reshape(len(whole.yy), 2, -1).sum((0, 2))
        share = float(left.sum() / total.sum()) if float(total.sum()) > 0 else 1.0
        if best is None or share < best[0]:
            best = (share, left, ridge)
    assert best is not None
    _, left, ridge = best
    gains = torch.where(total > 0, 1 - left / total.clamp_min(1e-300), torch.zeros_like(total))
    return Fit(whole.solve(ridge), LayerGain(float(gains[0]), float(gains[1]), ridge))


class Calibration:
    """What one rank has seen of the calibration requests so far."""

    def __init__(self, caches: KVCaches, rope: RopeParameters) -> None:
        layout = caches.layout
        self._rope = rope
        self._groups = num_groups(layout.num_kv_heads, layout.head_dim)
        width = layout.num_kv_heads // self._groups * layout.head_dim
        self._moments = [
            [Moments(self._groups, width) for _ in range(NUM_PARTS)] for _ in range(len(caches.layers))
        ]
        # By request and the chunk's first token: features of the chunk alone, by layer.
        self._alone: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._seen: dict[str, list[TokenRange]] = {}

    def see_alone(
        self, request_id: str, start: int, keys_values: torch.Tensor, positions: Positions, layer: int
    ) -> None:
        """Keep a layer of a chunk that was generated alone; layers come in order."""
        layers = self._alone.setdefault((request_id, start), [])
        if layer == 0:
            layers.clear()
        features = grouped(without_positions(keys_values, positions, self._rope), self._groups)
        layers.append(features.cpu())

    def unseen(self, request_id: str, start: int, end: int) -> list[TokenRange]:
        """The parts of chunks in `[start, end)` that were generated alone and not yet seen in context; now they are."""
        seen = self._seen.setdefault(request_id, [])
        chunks = [(first, first + layers[0].shape[1]) for first, layers in self._chunks(request_id)]
        wanted = [
            (max(start, first), min(end, last)) for first, last in chunks if first < end and start < last
        ]
        # Chunk by chunk: neighbours would come back as one range.
        fresh = [inside for one in wanted for inside in subtract([one], seen)]
        self._seen[request_id] = union(seen, fresh)
        return fresh

    def see_in_context(
        self,
        request_id: str,
        part: int,
        chunk_start: int,
        inside: TokenRange,
        keys_values: torch.Tensor,
        positions: Positions,
        layer: int,
    ) -> None:
        """Add the tokens `inside` a chunk, a layer of which is `keys_values` in full context."""
        begin, end = (position - chunk_start for position in inside)
        alone = self._alone[request_id, chunk_start][layer][:, begin:end].to(keys_values.device)
        context = grouped(without_positions(keys_values, positions, self._rope), self._groups)
        self._moments[layer][part % NUM_PARTS].add(alone, context - alone, positions.bins)

    def chunk_at(self, request_id: str, position: int) -> int:
        """Where the chunk begins in which a position lies."""
        return max(start for start, _ in self._chunks(request_id) if start <= position)

    def _chunks(self, request_id: str) -> list[tuple[int, list[torch.Tensor]]]:
        return [(start, kept) for (name, start), kept in self._alone.items() if name == request_id]

    def forget(self, request_id: str) -> None:
        """The request has ended; what it left in the sums stays."""
        self._seen.pop(request_id, None)
        self._alone = {name: kept for name, kept in self._alone.items() if name[0] != request_id}

    @property
    def num_tokens(self) -> int:
        """Tokens of documents that were seen alone and in context."""
        return sum(part.num_tokens for part in self._moments[0])

    def solve(self) -> tuple[dict[str, torch.Tensor], list[Fit]]:
        """The maps as tensors (see `Correction`), and each layer's fit.

        Raises ValueError if a part has seen nothing: then nothing can be held back.
        """
        if any(part.num_tokens == 0 for part in self._moments[0]):
            counts = [part.num_tokens for part in self._moments[0]]
            raise ValueError(f"calibration needs tokens in all {NUM_PARTS} parts; seen were {counts}")
        fits = [fit_layer(parts) for parts in self._moments]
        solutions = torch.stack([fit.kept() for fit in fits]).float()
        bins = len(OFFSET_BINS) + 1
        maps = {
            "weight": solutions[:, :, :-bins].contiguous(),
            "bias": solutions[:, :, -bins:].contiguous(),
            "corrected": solutions.flatten(1).any(1),
        }
        return maps, fits
