"""Next-token distributions along a given answer, from one request: what KL divergence from full prefill is taken of.

Two ways of computing a prompt can only be compared where their answers have the same beginning. So the answer is
not sampled: a logits processor of vLLM's forces the tokens of the reference's answer, and the model's own
log-probabilities, which vLLM takes before it, are returned for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

_FORCED = "daric_forced_tokens"
PROCESSOR = "daric_rag.evaluation.teacher_forcing:TeacherForcing"

ENGINE_ARGUMENTS: dict[str, Any] = {"logits_processors": [PROCESSOR], "max_logprobs": -1}
"""What an engine needs for `forced` parameters."""


class TeacherForcing(AdapterLogitsProcessor):
    """Makes requests with `forced` parameters choose the tokens that they name."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Nothing to check: the tokens come from an answer of the same model."""

    def is_argmax_invariant(self) -> bool:
        """Never: it decides what is chosen."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        """What is applied to the logits of a request; None leaves them alone."""
        tokens = (params.extra_args or {}).get(_FORCED)
        if tokens is None:
            return None

        def force(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(tokens):
                logits.fill_(-torch.inf)
                logits[tokens[len(output_ids)]] = 0.0
            return logits

        return force


def forced(tokens: Sequence[int]) -> SamplingParams:
    """Parameters under which the answer is `tokens`, with the log-probabilities of the whole vocabulary before each."""
    params = greedy(len(tokens))
    params.extra_args = {_FORCED: [int(token) for token in tokens]}
    return params


def greedy(num_tokens: int) -> SamplingParams:
    """Parameters of the reference: its own answer of exactly `num_tokens` tokens, with the same log-probabilities."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        logprobs=-1,
        flat_logprobs=True,
        detokenize=False,
    )


def log_probabilities(result: Any) -> NDArray[np.float64]:
    """The log-probabilities that a result of such parameters carries, `[num_tokens, vocabulary]`."""
    flat = result.logprobs
    token_ids, values = np.asarray(flat.token_ids), np.asarray(flat.logprobs, dtype=np.float64)
    spans = list(zip(flat.start_indices, flat.end_indices, strict=True))
    found = np.full((len(spans), int(token_ids.max()) + 1), -np.inf)
    for row, (start, end) in enumerate(spans):
        found[row, token_ids[start:end]] = values[start:end]
    return found
