"""The one thread that changes the disk tier: it writes what was committed or demoted."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.metrics import COUNTED
from daric_rag.engine.storage.base import Bytes
from daric_rag.engine.storage.counters import report_counters
from daric_rag.engine.storage.disk import TOUCH_INTERVAL_S, DiskRecord, DiskTier
from daric_rag.engine.storage.events import EventLog
from daric_rag.engine.storage.host import HostRecord, HostTier, State
from daric_rag.engine.storage.manifest import Manifest, update_manifest
from daric_rag.engine.storage.record import RecordHeader

logger = logging.getLogger(__name__)

MAX_QUEUED_KEYS = 4096
MAX_DEMOTED_SHARE = 8
"""At most an eighth of the host budget is held once more, by records that left it unwritten."""
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
REFRESH_INTERVAL_S = 60.0
REFRESH_SHARE = 16
ADOPT_BATCH = 64
REPORT_INTERVAL_S = 10.0


@dataclass(eq=False)
class WriteJob:
    """A record to write: pinned in host memory (`record`), or a copy of one that had to leave it."""

    key: SegmentKey
    parent: SegmentKey
    num_tokens: int
    namespace: bytes
    data: Bytes
    record: HostRecord | None = field(default=None)


class WriteBehind:
    """Everything but `flush` and `close` is called under the lock of `KVStore`; nothing waits for the disk.

    A committed record is written soon, from where it lies; what its queue cannot take is left to demotion.
    A record that host memory evicts unwritten is copied, within limits, and written first.
    A failed write marks the tier read-only: one warning, then attempts at growing intervals until one works.
    """

    def __init__(
        self,
        lock: threading.Lock,
        host: HostTier,
        disk: DiskTier,
        events: EventLog,
        counts: Counter[str],
        manifest: Manifest,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._host = host
        self._disk = disk
        self._events = events
        self._counts = counts
        self._manifest = manifest
        self._registered: set[str] = set()
        self._queue: dict[SegmentKey, None] = {}  # in order
        self._demoted: dict[SegmentKey, WriteJob] = {}
        self._demoted_bytes = 0
        self._max_demoted_bytes = host.arena.free_list.size // MAX_DEMOTED_SHARE
        self._busy = True
        self._stopping = False
        self.read_only = False
        self._retry_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._refreshed_at = 0.0
        self._written_bytes = 0
        self._reported: Counter[str] = Counter()
        self._reported_at = 0.0
        self._reported_host_bytes = 0
        self._thread = threading.Thread(target=self._run, name="daric-kv-write", daemon=True)

    def start(self) -> None:
        """Begin, with a look at the directory."""
        self._thread.start()

    @property
    def pending(self) -> int:
        """Records that are still to be written."""
        return len(self._queue) + len(self._demoted)

    def enqueue(self, record: HostRecord) -> None:
        """Write a complete host record some time soon."""
        if len(self._queue) < MAX_QUEUED_KEYS:
            self._queue[record.key] = None
            self._changed.notify_all()

    def demote(self, record: HostRecord) -> bool:
        """Keep a record that leaves host memory; False if it is lost."""
        on_disk = self._disk.get(record.key) is not None and record.key not in self._queue
        if on_disk or record.key in self._demoted:
            return True
        nbytes = record.data.nbytes
        if self.read_only and time.monotonic() < self._retry_at:
            return False
        if self._demoted and self._demoted_bytes + nbytes > self._max_demoted_bytes:
            return False
        self._demoted[record.key] = WriteJob(
            record.key, record.parent, record.num_tokens, record.namespace, record.data.copy()
        )
        self._demoted_bytes += nbytes
        self._changed.notify_all()
        return True

    def demoted(self, key: SegmentKey) -> WriteJob | None:
        """A record on its way from host memory to disk: readable from here."""
        return self._demoted.get(key)

    def note_namespace(self, digest: bytes, name: str) -> None:
        """Have the manifest know this tenant before its first record is written."""
        if name:
            self._manifest.namespaces.setdefault(digest.hex(), name)

    def wake(self) -> None:
        """Something that `flush` waits for has changed."""
        self._changed.notify_all()

    def flush(self, timeout: float, also: Callable[[], bool]) -> bool:
        """Wait until nothing is left to write, and `also`; False after `timeout` s or if the disk refuses."""
        with self._changed:
            self._changed.wait_for(lambda: (self._idle() or self.read_only) and also(), timeout)
            return self._idle() and also()

    def close(self, timeout: float) -> None:
        """End the thread, `timeout` seconds at most."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._disk.rank == 0:
            report_counters(self._disk.path, self._disk.root, self._increase(), None)

    def _report(self) -> None:
        """Enter what was counted since the last time, now and then; the first rank speaks for all."""
        if self._disk.rank or time.monotonic() - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = time.monotonic()
        host_bytes = self._host.used_bytes
        increase = self._increase()
        if any(increase.values()) or host_bytes != self._reported_host_bytes:
            self._reported_host_bytes = host_bytes
            report_counters(self._disk.path, self._disk.root, increase, host_bytes)

    def _increase(self) -> Counter[str]:
        with self._changed:
            counted = Counter({name: self._counts[name] for name in COUNTED})
        increase, self._reported = counted - self._reported, counted
        return increase

    def _idle(self) -> bool:
        return not (self._busy or self._queue or self._demoted)

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError):
                update_manifest(self._disk.path, self._manifest)
            self._refresh()
            while not self._stopping:
                job = self._next()
                if job is not None:
                    self._write(job)
                    if self._refresh_due():
                        self._refresh()
                self._report()
        except Exception:  # the last resort: requests go on with what is in memory and on disk already
            logger.exception("KV cache on disk: %s is not written any more", self._disk.path)
            with self._changed:
                self._busy, self.read_only, self._retry_at = False, True, math.inf
                self._changed.notify_all()

    def _next(self) -> WriteJob | None:
        """The next record to write; None after a while without one, and at the end."""
        with self._changed:
            self._busy = False
            until = time.monotonic() + REPORT_INTERVAL_S
            while not self._stopping and time.monotonic() < until:
                wait_s = self._retry_at - time.monotonic() if self.read_only else 0.0
                job = self._take() if wait_s <= 0 else None
                if job is not None:
                    self._busy = True
                    return job
                self._changed.notify_all()
                self._changed.wait(wait_s if self.pending and wait_s > 0 else REPORT_INTERVAL_S)
            return None

    def _take(self) -> WriteJob | None:
        if self._demoted:
            return next(iter(self._demoted.values()))
        while self._queue:
            key = next(iter(self._queue))
            del self._queue[key]
            record = self._host.get(key)
            if record is None or record.state is not State.READY:
                continue
            self._host.pin(record)
            return WriteJob(
                record.key, record.parent, record.num_tokens, record.namespace, record.data, record
            )
        return None

    def _write(self, job: WriteJob) -> None:
        # Bookkeeping is not enough: whoever commits a record that should be on disk may have missed it there.
        found = self._disk.find(job.key)
        if found is not None and found.num_tokens == job.num_tokens:
            self._finish(job, found)
            return
        header = self._disk.header_of(job.key, job.parent, job.num_tokens, job.namespace)
        with self._changed:
            known = self._disk.get(job.key)
            if known is not None:
                self._disk.forget(known)
            files = self._disk.make_room(header.file_nbytes)
            self._counts["disk_evictions"] += len(files or ())
        if files is None:
            self._finish(job, None)
            return
        for file in files:
            self._disk.delete(file)
        try:
            self._register(job.namespace)
            complete = self._disk.write(header, job.data)
        except OSError as error:
            self._fail(job, error)
        else:
            self._written(complete)
            self._finish(job, complete)

    def _register(self, namespace: bytes) -> None:
        with self._changed:
            manifest = replace(self._manifest, namespaces=dict(self._manifest.namespaces))
        if namespace.hex() in manifest.namespaces and namespace.hex() not in self._registered:
            update_manifest(self._disk.path, manifest)
            self._registered = set(manifest.namespaces)

    def _finish(self, job: WriteJob, header: RecordHeader | None) -> None:
        with self._changed:
            if header is not None:
                self._disk.adopt(header)
            self._let_go(job)

    def _written(self, header: RecordHeader) -> None:
        with self._changed:
            self._counts["disk_writes"] += 1
            self._written_bytes += header.file_nbytes
            self._recover()

    def _let_go(self, job: WriteJob) -> None:
        if job.record is not None:
            self._host.unpin(job.record)
            return
        del self._demoted[job.key]
        self._demoted_bytes -= job.data.nbytes
        if self._disk.get(job.key) is None:
            self._removed(job)

    def _fail(self, job: WriteJob, error: OSError) -> None:
        with self._changed:
            self._counts["write_errors"] += 1
            if not self.read_only:
                logger.warning(
                    "KV cache on disk: %s cannot be written (%s); it is only read until it can be",
                    self._disk.path,
                    error.strerror or error,
                )
            self.read_only = True
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            if job.record is not None:
                self._queue[job.key] = None
            self._let_go(job)
            self._changed.notify_all()

    def _recover(self) -> None:
        if not self.read_only:
            return
        logger.info("KV cache on disk: %s can be written again", self._disk.path)
        self.read_only = False
        self._retry_s = FIRST_RETRY_S
        self._queue.clear()
        for record in self._host.ready():
            if self._disk.get(record.key) is None:
                self.enqueue(record)

    def _removed(self, record: WriteJob | DiskRecord) -> None:
        held = self._host.get(record.key)
        if held is None or held.state is not State.READY:
            self._events.add("removed", record, Tier.DISK)

    def forgotten(self, record: DiskRecord) -> None:
        """The disk tier gave up a record."""
        if record.key not in self._demoted:
            self._removed(record)

    def _refresh_due(self) -> bool:
        aged = time.monotonic() - self._refreshed_at > REFRESH_INTERVAL_S
        return aged or self._written_bytes > self._disk.budget // REFRESH_SHARE

    def _refresh(self) -> None:
        """Make the bookkeeping agree with the directory, then the directory with the budget."""
        started = time.monotonic()
        seen: set[SegmentKey] = set()
        batch: list[tuple[SegmentKey, float, RecordHeader | None]] = []
        for item in self._disk.examine():
            if self._stopping:
                return
            seen.add(item[0])
            batch.append(item)
            if len(batch) == ADOPT_BATCH:
                self._adopt(batch)
                batch = []
        self._adopt(batch)
        with self._changed:
            for record in self._disk.records():
                if record.key not in seen and record.added < started:
                    self._disk.forget(record)
            files = self._disk.make_room(0) or []
            self._counts["disk_evictions"] += len(files)
            self._refreshed_at = time.monotonic()
            self._written_bytes = 0
        for file in files:
            self._disk.delete(file)

    def _adopt(self, batch: list[tuple[SegmentKey, float, RecordHeader | None]]) -> None:
        with self._changed:
            for key, last_access, header in batch:
                known = self._disk.get(key)
                if known is not None:
                    if last_access > known.last_access + TOUCH_INTERVAL_S:
                        self._disk.touch(known, last_access)
                elif header is not None:
                    record = self._disk.adopt(header, last_access)
                    if record is not None and self._host.get(key) is None:
                        self._events.add("added", record, Tier.DISK)
