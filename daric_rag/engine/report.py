"""What happened to the tokens of each request, told by the worker and read when the request ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from daric_rag.engine.token_ranges import TokenRange


@dataclass
class RequestReport:
    """Counts over all steps of one request, in tokens and seconds.

    The seconds are those of the steps that the request took part in, shared with whoever was in them.
    `attempt`: how often it was preempted before.
    """

    attempt: int = 0
    loaded_tokens: int = 0
    generated_tokens: int = 0
    live_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_ranges: list[TokenRange] = field(default_factory=list)
    failed_segments: int = 0
    load_s: float = 0.0
    generate_s: float = 0.0
    recompute_s: float = 0.0

    def add(self, other: RequestReport) -> None:
        """Add the counts of a further step."""
        self.loaded_tokens += other.loaded_tokens
        self.generated_tokens += other.generated_tokens
        self.live_tokens += other.live_tokens
        self.recomputed_tokens += other.recomputed_tokens
        self.recomputed_ranges += other.recomputed_ranges
        self.failed_segments += other.failed_segments
        self.load_s += other.load_s
        self.generate_s += other.generate_s
        self.recompute_s += other.recompute_s


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
