"""What all requests of an engine add up to: the numbers of `DaricEngine.stats`."""

from __future__ import annotations

import threading
from typing import Any

from daric_rag.engine.result import RequestMetrics


class Totals:
    """Sums over all finished requests; for any thread."""

    _SUMMED = (
        "prompt_tokens",
        "padding_tokens",
        "engine_hit_tokens",
        "loaded_tokens",
        "generated_tokens",
        "recomputed_tokens",
        "live_tokens",
        "completion_tokens",
        "failed_segments",
        "lookup_s",
        "load_s",
        "generate_s",
        "recompute_s",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = 0
        self._reused = 0
        self._sums: dict[str, float] = dict.fromkeys(self._SUMMED, 0)

    def add(self, metrics: RequestMetrics) -> None:
        """Add one request."""
        with self._lock:
            self._requests += 1
            self._reused += metrics.reused
            for name in self._SUMMED:
                self._sums[name] += getattr(metrics, name)

    def to_dict(self) -> dict[str, Any]:
        """The sums so far: `requests`, `requests_with_reuse`, then tokens and seconds by their metric's name."""
        with self._lock:
            return {"requests": self._requests, "requests_with_reuse": self._reused, **self._sums}
