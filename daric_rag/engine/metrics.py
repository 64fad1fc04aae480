"""Every count and every second that daric_rag tells, from one request to a whole cache directory.

A request's own: the scheduler's side and the worker fill a `RequestReport`, your process makes `RequestMetrics`
of it. An engine's: `Totals`. The cache's: `StoreStats` of one rank's store, `IndexStats`, and `Counters`, which
a cache directory keeps over all engines.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from daric_rag.engine.token_ranges import TokenRange

COUNTED = ("host_hits", "disk_hits", "misses", "evictions", "disk_evictions")
"""The counts of `StoreStats` that a cache directory adds up over all engines."""


@dataclass(frozen=True)
class RequestMetrics:
    """What happened to the tokens of one prompt.

    `prompt_tokens` counts what the model sees, padding included, and equals `engine_hit_tokens` +
    `loaded_tokens` + `generated_tokens` + `live_tokens`. `recomputed_tokens` counts all tokens of the
    partial-recomputation phase, live ones included; `recomputed_ranges` says which. `chunk_bounds` and
    `document_ranges` are `[start, end)` token ranges of the chunks, and of those that are documents. Seconds
    are wall clock; those of a step shared with other requests are the whole step's.
    """

    prompt_tokens: int
    padding_tokens: int
    engine_hit_tokens: int
    loaded_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    live_tokens: int
    ttft_s: float
    recomputed_ranges: tuple[TokenRange, ...] = ()
    completion_tokens: int = 0
    num_chunks: int = 1
    chunk_bounds: tuple[TokenRange, ...] = ()
    document_ranges: tuple[TokenRange, ...] = ()
    dropped_documents: int = 0
    recognised_documents: int = 0
    failed_segments: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    generate_s: float = 0.0
    recompute_s: float = 0.0
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The metrics as plain JSON values."""
        values = asdict(self)
        for name in ("recomputed_ranges", "chunk_bounds", "document_ranges"):
            values[name] = [list(item) for item in values[name]]
        return values


@dataclass
class RequestReport:
    """Counts over all steps of one request, in tokens and seconds.

    The scheduler's side counts `engine_hit_tokens` and `lookup_s`, the worker everything else. The seconds are
    those of the steps that the request took part in, shared with whoever was in them. `unstored`: chunks that
    could not be generated on their own, so that their KV was computed but not stored. `attempt`: how often the
    request was preempted before.
    """

    attempt: int = 0
    engine_hit_tokens: int = 0
    loaded_tokens: int = 0
    generated_tokens: int = 0
    live_tokens: int = 0
    recomputed_tokens: int = 0
    recomputed_ranges: list[TokenRange] = field(default_factory=list)
    failed_segments: int = 0
    unstored: list[TokenRange] = field(default_factory=list)
    lookup_s: float = 0.0
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
        self.unstored += other.unstored
        self.load_s += other.load_s
        self.generate_s += other.generate_s
        self.recompute_s += other.recompute_s


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


@dataclass(frozen=True)
class StoreStats:
    """Counters of one store, that of one rank, since it was opened; sizes in bytes."""

    host_bytes: int = 0
    host_budget: int = 0
    host_records: int = 0
    detached_bytes: int = 0
    """Of records that found no room in host memory's arena and are being read or wait to be written."""
    detached_budget: int = 0
    disk_bytes: int = 0
    disk_budget: int = 0
    disk_records: int = 0
    disk_other_bytes: int = 0
    """Of other models and ranks under the same budget, when the directory was last looked at."""
    pins: int = 0
    reservations: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    no_room: int = 0
    """Records on disk that could not be read for lack of memory; no misses."""
    evictions: int = 0
    disk_evictions: int = 0
    promotions: int = 0
    disk_writes: int = 0
    pending_writes: int = 0
    damaged: int = 0
    write_errors: int = 0
    read_only: bool = False


def over_ranks(stores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `StoreStats` of all ranks, as dicts, added up; a flag is set if it is set on any of them."""
    return {name: type(value)(sum(store[name] for store in stores)) for name, value in stores[0].items()}


@dataclass(frozen=True, slots=True)
class IndexStats:
    """What an index holds, and how it fares with the server behind it, if there is one."""

    segments: int
    """Segments with at least one copy, whatever the root."""
    available: bool = True
    """False while the server cannot be reached and every look-up is a miss."""
    failures: int = 0
    """Calls to the server that failed."""
    dropped: int = 0
    """Keys of queued updates that were given up because the queue was full or the server refused them."""


@dataclass
class Counters:
    """`counts`: sums over all engines since the directory was made. `host_bytes`: of the engines that run now."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    host_bytes: dict[str, int] = field(default_factory=dict)
    """Process (`<pid>-<start time>`) -> bytes in its host tier when it last reported."""
