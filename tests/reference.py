"""Position-independent reuse written down once more, slowly, in plain Transformers code: what the engine must equal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from daric_rag.engine.token_ranges import TokenRange


class ReferenceLlama:
    """A Llama checkpoint in float32."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._layers = self.model.model.layers
        self._head_dim = self.model.config.head_dim
        self._groups = self.model.config.num_attention_heads // self.model.config.num_key_value_heads

    @torch.inference_mode()
    def log_probs(
        self, token_ids: Sequence[int], bounds: Sequence[TokenRange], recompute: Sequence[TokenRange]
    ) -> torch.Tensor:
        """First-token log-probabilities `[vocabulary]`, chunks at `bounds` reused, `recompute` computed again.

        Every chunk's keys and values are computed with nothing before it, its keys turned to where it stands;
        then the tokens of `recompute` go through the layers together, each seeing all that stands before it.
        """
        tokens = torch.tensor([list(token_ids)])
        keys, values = self._independent(tokens, bounds)
        chosen = torch.cat([torch.arange(start, end) for start, end in recompute])
        hidden = self.model.model.embed_tokens(tokens[:, chosen])
        rotation = self._rotation(chosen)
        visible = torch.arange(tokens.shape[1])[None] <= chosen[:, None]
        for number, layer in enumerate(self._layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query, key, value = (
                self._heads(project(normed))
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, *rotation)
            keys[number][:, :, chosen], values[number][:, :, chosen] = key, value
            seen = torch.nn.functional.scaled_dot_product_attention(
                query,
                keys[number].repeat_interleave(self._groups, 1),
                values[number].repeat_interleave(self._groups, 1),
                attn_mask=visible[None, None],
            )
            hidden = hidden + attention.o_proj(seen.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = self.model.model.norm(hidden[:, -1])
        return torch.log_softmax(self.model.lm_head(last)[0], -1)

    def full_log_probs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The same by an ordinary prefill."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(token_ids)]), logits_to_keep=1).logits
        return torch.log_softmax(logits[0, -1], -1)

    def _independent(
        self, tokens: torch.Tensor, bounds: Sequence[TokenRange]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        count = len(self._layers)
        parts: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in range(count)]
        for start, end in bounds:
            cache = self.model(tokens[:, start:end], use_cache=True).past_key_values
            cos, sin = self._rotation(torch.full((end - start,), start))
            for number in range(count):
                key = cache.layers[number].keys
                turned, _ = apply_rotary_pos_emb(key, key, cos, sin)
                parts[number][0].append(turned)
                parts[number][1].append(cache.layers[number].values)
        return [torch.cat(keys, 2) for keys, _ in parts], [torch.cat(values, 2) for _, values in parts]

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.model.model.rotary_emb(torch.zeros(1, 1, 1), positions[None])
        return cos, sin

    def _heads(self, projected: torch.Tensor) -> torch.Tensor:
        return projected.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
