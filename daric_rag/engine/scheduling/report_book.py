"""What happened to the tokens of each request, told by the worker step by step and read when the request ends."""

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

    def of(self, request_id: str) -> RequestReport:
        """The report of a request in flight, begun at the first call."""
        return self._open.setdefault(request_id, RequestReport())

    def attempt(self, request_id: str) -> int:
        """How often the request was preempted."""
        return self.of(request_id).attempt

    def add(self, request_id: str, report: RequestReport) -> None:
        """Add one step's report, if the request is in flight or ended in that step.

        With async scheduling that of a step from before a preemption may come in after it: it does not count.
        """
        if request_id in self._closing:
            total, values = self._closing[request_id]
            total.add(report)
            values.update(_values(total))
        elif request_id in self._open and report.attempt == self._open[request_id].attempt:
            self._open[request_id].add(report)

    def restart(self, request_id: str) -> None:
        """Forget a request's counts: it was preempted and starts again."""
        before = self.of(request_id)
        self._open[request_id] = RequestReport(before.attempt + 1, lookup_s=before.lookup_s)

    def close(self, request_id: str) -> dict[str, Any]:
        """The values of a request that ended; see above."""
        report = self._open.pop(request_id, RequestReport())
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
