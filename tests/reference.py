"""Position-independent reuse written down once more, slowly, with Transformers' models: what the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from daric_rag.engine.token_ranges import TokenRange


class ReferenceModel:
    """A checkpoint of any family in float32.

    Nothing is rotated here. A rotary embedding sees only how far two tokens are apart, so a chunk whose keys were
    turned to where it stands is the chunk computed where it stands, with nothing before it in sight.
    """

    def __init__(self, path: str) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def log_probs(
        self, token_ids: Sequence[int], bounds: Sequence[TokenRange], recompute: Sequence[TokenRange]
    ) -> torch.Tensor:
        """First-token log-probabilities `[vocabulary]`, chunks at `bounds` reused, `recompute` computed again.

        Every chunk's keys and values are computed with nothing before it; then the tokens of `recompute` go
        through the layers together, each seeing all that stands before it.
        """
        tokens, cache = torch.tensor(token_ids), _PromptCache(len(token_ids))
        for start, end in bounds:
            self._forward(tokens, cache, torch.arange(start, end), first_visible=start)
        chosen = torch.cat([torch.arange(start, end) for start, end in recompute])
        return self._forward(tokens, cache, chosen, first_visible=0)

    def full_log_probs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The same by an ordinary prefill."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(token_ids)]), logits_to_keep=1).logits
        return torch.log_softmax(logits[0, -1], -1)

    def _forward(
        self, tokens: torch.Tensor, cache: _PromptCache, positions: torch.Tensor, first_visible: int
    ) -> torch.Tensor:
        """Compute the tokens at `positions` into the cache; each sees `[first_visible, its own position]`."""
        cache.positions = positions
        others = torch.arange(len(tokens))
        visible = (others >= first_visible) & (others <= positions[:, None])
        logits = self._model(
            tokens[None, positions],
            position_ids=positions[None],
            attention_mask=torch.zeros(visible.shape).masked_fill(~visible, -torch.inf)[None, None],
            past_key_values=cache,
            logits_to_keep=1,
        ).logits
        return torch.log_softmax(logits[0, -1], -1)


class _PromptCache:
    """The part of Transformers' `Cache` that models call: a whole prompt, written at `positions`."""

    def __init__(self, num_tokens: int) -> None:
        self.positions = torch.arange(0)
        self._num_tokens = num_tokens
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values `[1, heads, positions, head_dim]`; return the whole prompt's."""
        if layer not in self._layers:
            batch, heads, _, width = key.shape
            self._layers[layer] = tuple(key.new_zeros(batch, heads, self._num_tokens, width) for _ in "kv")
        keys, values = self._layers[layer]
        keys[:, :, self.positions], values[:, :, self.positions] = key, value
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        """What a model counts positions from, where it is not told them."""
        return 0
