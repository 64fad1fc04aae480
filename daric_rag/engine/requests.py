"""From a processed prompt to what vLLM's AsyncLLM is given."""

from __future__ import annotations

import copy
import hashlib
import json
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar

from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import ProcessedPrompt
from daric_rag.engine.scheduling.plan import EXTRA_ARGS_KEY, ChunkLayout
from daric_rag.engine.selection import SelectionSettings
from daric_rag.prompt import ChatPrompt, ChunkedPrompt, items_of

if TYPE_CHECKING:
    from vllm import SamplingParams

DEFAULT_MAX_TOKENS = 256

T = TypeVar("T")


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt rather than a list of them; a sequence of numbers is one prompt."""
    if isinstance(prompts, str | ChunkedPrompt | ChatPrompt):
        return True
    items = items_of("prompts", prompts, "a ChunkedPrompt, ChatPrompt, text, token ids or a list of these")
    return bool(items) and isinstance(items[0], Number)


def build_request(
    processed: ProcessedPrompt,
    params: SamplingParams | None,
    config: DaricConfig,
    *,
    stream: bool,
    profile: str = "",
) -> tuple[Any, SamplingParams]:
    """The prompt and sampling parameters for `AsyncLLM.generate`; the caller's parameters stay as they are.

    `profile`: digest of the profile whose correction the documents' KV gets, "" for none.
    Reuse and exact requests never share vLLM's prefix cache: the former carry a salt made of their settings.
    Raises `ValueError` for parameters that the engine's process could not read.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = _default_params() if params is None else as_received("params", params, SamplingParams)
    sampling.output_kind = RequestOutputKind.DELTA if stream else RequestOutputKind.CUMULATIVE
    prompt = TokensPrompt(prompt_token_ids=processed.token_ids)
    salt = f"namespace:{config.namespace}" if config.namespace else ""
    # With prompt_logprobs every token's logits are wanted, so every token is computed: plain vLLM.
    if config.reuse and processed.bounds and sampling.prompt_logprobs is None:
        layout = _layout(processed, config, profile)
        sampling.extra_args = {**(sampling.extra_args or {}), EXTRA_ARGS_KEY: layout.to_extra_args()}
        salt = reuse_salt(config, profile)
    if salt:
        prompt["cache_salt"] = salt
    return prompt, sampling


def checked_adapter(lora_request: Any) -> Any:
    """The `vllm.lora.request.LoRARequest` of a call, or None. Raises `ValueError` for anything else."""
    from vllm.lora.request import LoRARequest

    return None if lora_request is None else as_received("lora_request", lora_request, LoRARequest)


def as_received(place: str, value: Any, expected: type[T]) -> T:
    """A copy of `value` as the engine's process will read it, with plain numbers in place of NumPy's.

    vLLM sends requests as msgpack and checks types only where they arrive, where a wrong one ends the thread that
    receives all requests. Raises `ValueError` that names what is wrong.
    """
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    if not isinstance(value, expected):
        raise ValueError(f"{place}: a vLLM {expected.__name__} is expected, found {type(value).__name__}")
    plain = copy.copy(value)
    for name in expected.__struct_fields__:  # type: ignore[attr-defined]
        setattr(plain, name, _plain(getattr(value, name)))
    try:
        received: T = MsgpackDecoder(expected).decode(MsgpackEncoder().encode(plain))
    except Exception as error:  # of msgspec, of vLLM's own hooks and checks
        raise ValueError(f"{place}: {error}") from error
    return received


def _plain(value: Any) -> Any:
    """The value with the scalars of NumPy and torch in it turned into Python's; arrays stay, vLLM can send them."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item) for item in value)
    return value.item() if getattr(value, "ndim", None) == 0 else value


def warm_request(
    chunk: ProcessedPrompt, config: DaricConfig, request_id: str, profile: str = ""
) -> tuple[Any, SamplingParams]:
    """A request whose only purpose is that its chunk is stored; alone in its prefix-cache world."""
    nothing = SelectionSettings(strategy="none")
    fields = {"namespace": config.namespace, "profile": profile, "warm": True}
    layout = ChunkLayout.select(chunk.bounds, chunk.live, nothing, **fields)
    return _request_without_answer(chunk, layout, f"warm:{request_id}")


def calibration_request(group: ProcessedPrompt, part: int, request_id: str) -> tuple[Any, SamplingParams]:
    """A request that computes its documents alone and in context, for the worker's `Calibration` to see."""
    layout = ChunkLayout.select(
        group.bounds,
        group.live,
        SelectionSettings(strategy="all"),
        namespace=f"calibration:{request_id}",
        calibration=part,
    )
    return _request_without_answer(group, layout, f"calibration:{request_id}")


def _request_without_answer(
    processed: ProcessedPrompt, layout: ChunkLayout, salt: str
) -> tuple[Any, SamplingParams]:
    """`salt`: a prefix-cache world that nobody else is in."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(temperature=0.0, max_tokens=1, output_kind=RequestOutputKind.FINAL_ONLY)
    sampling.detokenize = False
    sampling.extra_args = {EXTRA_ARGS_KEY: layout.to_extra_args()}
    return TokensPrompt(prompt_token_ids=processed.token_ids, cache_salt=salt), sampling


def reuse_salt(config: DaricConfig, profile: str = "") -> str:
    """Equal for requests whose approximate KV may stand for each other's."""
    settings = [
        config.selection,
        config.n_avg,
        config.ratio,
        config.mtaf,
        config.max_fraction,
        config.cache_query,
        config.namespace,
        profile,
    ]
    return "daric:" + hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()


def _layout(processed: ProcessedPrompt, config: DaricConfig, profile: str) -> ChunkLayout:
    selection = SelectionSettings(
        config.selection, config.n_avg, config.ratio, config.mtaf, config.max_fraction
    )
    fields = {"namespace": config.namespace, "profile": profile}
    return ChunkLayout.select(processed.bounds, processed.live, selection, **fields)


def _default_params() -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS)
