"""Empty outputs for requests that vLLM scheduled and that were in no pass: their prompt goes on in the next step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


def with_empty_outputs(
    output: ModelRunnerOutput | AsyncModelRunnerOutput, absent: Sequence[str]
) -> ModelRunnerOutput | AsyncModelRunnerOutput:
    """The output of a step with an empty one for each of the requests `absent`."""
    return (
        _Completed(output, absent)
        if isinstance(output, AsyncModelRunnerOutput)
        else _completed(output, absent)
    )


class _Completed(AsyncModelRunnerOutput):
    """An output that is still being computed on the device, with empty outputs added once it is there."""

    def __init__(self, inner: AsyncModelRunnerOutput, absent: Sequence[str]) -> None:
        self._inner = inner
        self._absent = absent

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the device, then add the empty outputs."""
        return _completed(self._inner.get_output(), self._absent)


def _completed(output: ModelRunnerOutput, absent: Sequence[str]) -> ModelRunnerOutput:
    req_ids, index = list(output.req_ids), dict(output.req_id_to_index)
    sampled = list(output.sampled_token_ids)
    for request_id in absent:
        index[request_id] = len(req_ids)
        req_ids.append(request_id)
        sampled.append([])
    return dataclasses.replace(output, req_ids=req_ids, req_id_to_index=index, sampled_token_ids=sampled)
