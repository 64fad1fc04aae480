"""From a processed prompt to what vLLM's AsyncLLM is given."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import TYPE_CHECKING, Any

from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY, ChunkLayout
from daric_rag.engine.selection import SelectionSettings
from daric_rag.prompt import ChatPrompt, ChunkedPrompt

if TYPE_CHECKING:
    from vllm import SamplingParams

DEFAULT_MAX_TOKENS = 256


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt rather than a list of them; a sequence of integers is one prompt."""
    if isinstance(prompts, str | ChunkedPrompt | ChatPrompt):
        return True
    if not isinstance(prompts, list | tuple):
        raise ValueError(
            f"a prompt is a ChunkedPrompt, a ChatPrompt, a text or token ids, not {type(prompts).__name__}"
        )
    return bool(prompts) and isinstance(prompts[0], int)


def build_request(
    processed: ProcessedPrompt, params: SamplingParams | None, config: DaricConfig, *, stream: bool
) -> tuple[Any, SamplingParams]:
    """The prompt and sampling parameters for `AsyncLLM.generate`; the caller's parameters stay as they are.

    Reuse and exact requests never share vLLM's prefix cache: the former carry a salt made of their settings.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = copy.deepcopy(params) if params is not None else _default_params()
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"params: vllm.SamplingParams is expected, not {type(sampling).__name__}")
    sampling.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.CUMULATIVE
    prompt = TokensPrompt(prompt_token_ids=processed.token_ids)
    salt = f"namespace:{config.namespace}" if config.namespace else ""
    # With prompt_logprobs every token's logits are wanted, so every token is computed: plain vLLM.
    if config.reuse and processed.bounds and sampling.prompt_logprobs is None:
        layout = _layout(processed, config)
        sampling.extra_args = {**(sampling.extra_args or {}), EXTRA_ARGS_KEY: layout.to_extra_args()}
        salt = reuse_salt(layout, config)
    if salt:
        prompt["cache_salt"] = salt
    return prompt, sampling


def warm_request(chunk: ProcessedPrompt, config: DaricConfig, request_id: str) -> tuple[Any, SamplingParams]:
    """A request whose only purpose is that its chunk is stored; alone in its prefix-cache world."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    layout = ChunkLayout(
        chunk.bounds, chunk.live, SelectionSettings(strategy="none"), config.namespace, warm=True
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    sampling.detokenize = False
    sampling.extra_args = {EXTRA_ARGS_KEY: layout.to_extra_args()}
    return TokensPrompt(prompt_token_ids=chunk.token_ids, cache_salt=f"warm:{request_id}"), sampling


def reuse_salt(layout: ChunkLayout, config: DaricConfig) -> str:
    """Equal for requests whose approximate KV may stand for each other's."""
    selection = layout.selection
    settings = [
        selection.strategy,
        selection.n_avg,
        selection.ratio,
        selection.mtaf,
        selection.max_fraction,
        config.cache_query,
        config.namespace,
    ]
    return "daric:" + hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()


def _layout(processed: ProcessedPrompt, config: DaricConfig) -> ChunkLayout:
    selection = SelectionSettings(
        config.selection, config.n_avg, config.ratio, config.mtaf, config.max_fraction
    )
    return ChunkLayout(processed.bounds, processed.live, selection, config.namespace)


def _default_params() -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS)
