"""What happened to the tokens of each request, told by the worker and read when the request ends."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from daric_rag.engine.metrics import RequestReport


class ReportBook:
    """Reports of the requests in flight, kept by the scheduler's side.

    vLLM asks for a request's closing parameters before it hands over the worker's output of the same step. So
    `close` gives out a dict that later reports of that step are still added to; vLLM sends it off afterwards.
    """

    def __init__(self) -> None:
        self._open: dict[str, RequestReport] = {}
        self._closing: dict[str, tuple[RequestReport, dict[str, Any]]] = {}
        self._attempts: dict[str, int] = {}

    def add(self, request_id: str, report: RequestReport) -> None:
        """Add one step's report.

        With async scheduling that of a step from before a preemption may come in after it: it does not count.
        """
        if report.attempt < self._attempts.get(request_id, 0):
            return
        if request_id in self._closing:
            total, values = self._closing[request_id]
            total.add(report)
            values.update(_values(total))
        else:
            self._open.setdefault(request_id, RequestReport()).add(report)

    def is_closing(self, request_id: str) -> bool:
        """Whether the request ended in the step whose reports come in now."""
        return request_id in self._closing

    def reset(self, request_id: str) -> None:
        """Forget a request's counts: it was preempted and starts again."""
        self._open.pop(request_id, None)
        self._attempts[request_id] = self._attempts.get(request_id, 0) + 1

    def close(self, request_id: str) -> dict[str, Any]:
        """The values of a request that ended; see above."""
        report = self._open.pop(request_id, RequestReport())
        self._attempts.pop(request_id, None)
        values = _values(report)
        self._closing[request_id] = (report, values)
        return values

    def next_step(self) -> None:
        """Let go of the values given out: they are on their way."""
        self._closing.clear()


def _values(report: RequestReport) -> dict[str, Any]:
    values = asdict(report)
    del values["attempt"]
    return values
