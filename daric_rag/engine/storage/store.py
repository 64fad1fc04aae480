"""`KVStore`: the KV of one model and one tensor-parallel rank, in host memory with an optional disk tier below."""

from __future__ import annotations

import threading
from collections import Counter, deque

from daric_rag.engine.index.keys import KEY_BYTES, SegmentKey
from daric_rag.engine.storage.base import (
    ReadHandle,
    RecordSpec,
    StoreEvent,
    StoreStats,
    Tier,
    WriteHandle,
    check_segment,
)
from daric_rag.engine.storage.host import HostRecord, HostTier, State
from daric_rag.errors import EngineClosedError


class KVStore:
    """Holds segments as canonical records; safe to call from any thread, and none of its calls waits for a disk.

    Raises `ValueError` for options or keys out of range, `CacheUnavailableError` for a location that cannot be used.
    """

    def __init__(
        self,
        spec: RecordSpec,
        *,
        host_bytes: int,
        disk_path: str | None = None,
        disk_bytes: int = 0,
        model_id: str = "",
        rank: int = 0,
        root: bytes,
        pin_memory: bool = False,
    ) -> None:
        if host_bytes < 1:
            raise ValueError(f"host_bytes={host_bytes}: allowed is a positive number of bytes")
        if len(root) != KEY_BYTES:
            raise ValueError(f"root={root!r}: allowed are {KEY_BYTES} bytes")
        self.spec = spec
        self.root = root
        self._lock = threading.Lock()
        self._closed = False
        self._events: list[StoreEvent] = []
        self._counts: Counter[str] = Counter()
        self._pins = 0
        self._reservations = 0
        # Handles that were dropped: a destructor may run anywhere, also under our lock, so it only leaves a note.
        self._dropped_reads: deque[HostRecord] = deque()
        self._dropped_writes: deque[HostRecord] = deque()
        self._host = HostTier(spec, host_bytes, pin_memory=pin_memory, on_evict=self._evicted)

    def reserve(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, *, namespace: str = ""
    ) -> WriteHandle | None:
        """Space for a new record, invisible until `commit`; None if it cannot fit or is in host memory already."""
        check_segment(key, parent, num_tokens)
        with self._lock:
            self._enter()
            record = self._host.reserve(key, parent, num_tokens, namespace)
            if record is None:
                return None
            self._reservations += 1
            return WriteHandle(key, num_tokens, record.data, record, self._dropped_writes.append)

    def commit(self, handle: WriteHandle) -> None:
        """Make a filled record visible; it may be copied to disk afterwards, in the background."""
        with self._lock:
            self._enter()
            record, handle.record = handle.record, None
            if isinstance(record, HostRecord):
                self._reservations -= 1
                self._host.publish(record)
                self._emit("added", record, "host")

    def abort(self, handle: WriteHandle) -> None:
        """Give the space of an unfinished record back."""
        with self._lock:
            record, handle.record = handle.record, None
            if isinstance(record, HostRecord):
                self._abort(record)

    def acquire(self, key: SegmentKey) -> ReadHandle | None:
        """The pinned record of `key`, or None for a miss."""
        with self._lock:
            self._enter()
            record = self._host.get(key)
            if record is None or record.state is not State.READY:
                self._counts["misses"] += 1
                return None
            self._host.pin(record)
            self._host.touch(record)
            self._pins += 1
            self._counts["host_hits"] += 1
            return ReadHandle(
                key, record.num_tokens, "host", record.data, record, None, self._dropped_reads.append
            )

    def release(self, handle: ReadHandle) -> None:
        """Unpin; a second call does nothing."""
        with self._lock:
            record, handle.record = handle.record, None
            if isinstance(record, HostRecord):
                self._release(record)

    def contains(self, key: SegmentKey) -> Tier | None:
        """The fastest tier that holds `key`; not a use of it."""
        with self._lock:
            record = self._host.get(key)
            return "host" if record is not None and record.state is State.READY else None

    def drain_events(self) -> list[StoreEvent]:
        """What happened since the last call, in order."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def stats(self) -> StoreStats:
        """Counters so far."""
        with self._lock:
            self._sweep()
            return StoreStats(
                host_bytes=self._host.used_bytes,
                host_budget=self._host.arena.free_list.size,
                host_records=len(self._host),
                pins=self._pins,
                reservations=self._reservations,
                **self._counts,
            )

    def flush(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until everything is on disk that should be; False if it is not."""
        return True

    def close(self) -> None:
        """Stop background work; reading handles stay readable, all other calls raise `EngineClosedError`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._host.arena.close()

    def _enter(self) -> None:
        if self._closed:
            raise EngineClosedError("the KV store was closed")
        self._sweep()

    def _sweep(self) -> None:
        while self._dropped_writes:
            self._abort(self._dropped_writes.popleft())
        while self._dropped_reads:
            self._release(self._dropped_reads.popleft())

    def _abort(self, record: HostRecord) -> None:
        self._reservations -= 1
        self._host.discard(record)
        self._host.unpin(record)

    def _release(self, record: HostRecord) -> None:
        self._pins -= 1
        self._host.unpin(record)

    def _evicted(self, record: HostRecord) -> None:
        self._counts["evictions"] += 1
        self._emit("removed", record, "host")

    def _emit(self, kind: str, record: HostRecord, tier: Tier) -> None:
        self._events.append(StoreEvent(kind, record.key, record.parent, record.num_tokens, tier))  # type: ignore[arg-type]
