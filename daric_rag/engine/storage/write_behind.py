"""The one thread that changes the disk tier: it writes what was committed."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import COUNTED
from daric_rag.engine.storage.counters import report_counters
from daric_rag.engine.storage.disk import STAMP_INTERVAL_S, DiskTier
from daric_rag.engine.storage.host import HostRecord, HostTier
from daric_rag.engine.storage.manifest import Manifest, update_manifest
from daric_rag.engine.storage.record import RecordHeader

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 30.0
REFRESH_INTERVAL_S = 60.0
REFRESH_SHARE = 32
BATCH = 64
"""Records that are dealt with in one go under the lock."""
REPORT_INTERVAL_S = 10.0


class WriteBehind:
    """Everything but `flush` and `close` is called under the lock of `KVStore`; nothing waits for the disk.

    A committed record is written soon, from where it lies in host memory: until then its place in the queue
    pins it there, so nothing is ever copied. While nothing can be written nothing is pinned either.
    A failed write marks the tier read-only: one warning, then attempts at growing intervals until one works.
    """

    def __init__(
        self,
        lock: threading.Lock,
        host: HostTier,
        disk: DiskTier,
        counts: Counter[str],
        manifest: Manifest,
    ) -> None:
        self._changed = threading.Condition(lock)
        self._host = host
        self._disk = disk
        self._counts = counts
        self._manifest = manifest
        self._registered: set[str] = set()
        # All pinned, in the order of their commits; empty while the tier is read-only.
        self._queue: OrderedDict[SegmentKey, HostRecord] = OrderedDict()
        self._busy = True
        self._stopping = False
        self.read_only = False
        self._retry_s = FIRST_RETRY_S
        self._retry_at = 0.0
        self._refreshed_at = 0.0
        self._written_bytes = 0
        self._stamped_at = time.monotonic()
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
        return sum(1 for _ in self._lacking()) if self.read_only else len(self._queue)

    def enqueue(self, record: HostRecord) -> None:
        """Write a complete host record some time soon."""
        if not self.read_only:
            self._host.pin(record)
            self._queue[record.key] = record
        self._changed.notify_all()

    def give_up(self) -> bool:
        """Leave the oldest record that only the queue keeps in the arena to eviction; False if there is none.

        For a disk that is slower than what is stored: host memory goes on as if it were alone.
        """
        for record in self._queue.values():
            if record.attached and record.pins == 1:
                del self._queue[record.key]
                self._host.unpin(record)
                return True
        return False

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

    def _stamp(self) -> None:
        """Tell the files how they were used, now and then, so that a later engine knows."""
        with self._changed:
            used = iter(self._disk.take_used())
            self._stamped_at = time.monotonic()
        while keys := list(islice(used, BATCH)):
            with self._changed:
                stamps = self._disk.stamps_of(keys)
            self._disk.stamp(stamps)

    def _report(self) -> None:
        """Enter what was counted since the last time, now and then."""
        if time.monotonic() - self._reported_at < REPORT_INTERVAL_S:
            return
        self._reported_at = time.monotonic()
        host_bytes = self._host.used_bytes
        increase = self._increase()
        if any(increase.values()) or host_bytes != self._reported_host_bytes:
            self._reported_host_bytes = host_bytes
            report_counters(self._disk.path, self._disk.root, increase, host_bytes)

    def _increase(self) -> Counter[str]:
        if self._disk.rank:  # all ranks use and lose the same records: the first speaks for them
            return Counter()
        with self._changed:
            counted = Counter({name: self._counts[name] for name in COUNTED})
        increase, self._reported = counted - self._reported, counted
        return increase

    def _idle(self) -> bool:
        return not (self._busy or self.pending)

    def _lacking(self) -> Iterator[HostRecord]:
        return (record for record in self._host.ready() if self._disk.get(record.key) is None)

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError):
                update_manifest(self._disk.path, self._manifest)
            self._refresh()
            while not self._stopping:
                record = self._next()
                if record is not None:
                    self._write(record)
                    if self._refresh_due():
                        self._refresh()
                if time.monotonic() - self._stamped_at > STAMP_INTERVAL_S:
                    self._stamp()
                self._report()
            self._stamp()
            report_counters(self._disk.path, self._disk.root, self._increase(), None)
        except Exception:  # the last resort: requests go on with what is in memory and on disk already
            logger.exception("KV cache on disk: %s is not written any more", self._disk.path)
            with self._changed:
                self._busy, self._retry_at = False, math.inf
                if not self.read_only:
                    self._give_all_up()
                self._changed.notify_all()

    def _next(self) -> HostRecord | None:
        """The next record to write, pinned; None after a while without one, and at the end."""
        with self._changed:
            self._busy = False
            until = time.monotonic() + REPORT_INTERVAL_S
            while not self._stopping and time.monotonic() < until:
                wait_s = self._retry_at - time.monotonic() if self.read_only else 0.0
                record = self._take() if wait_s <= 0 else None
                if record is not None:
                    self._busy = True
                    return record
                self._changed.notify_all()
                self._changed.wait(min(wait_s, REPORT_INTERVAL_S) if wait_s > 0 else REPORT_INTERVAL_S)
            return None

    def _take(self) -> HostRecord | None:
        if not self.read_only:
            return self._queue.popitem(last=False)[1] if self._queue else None
        record = next(self._lacking(), None)  # any will do to see whether the disk can be written again
        if record is not None:
            self._host.pin(record)
        return record

    def _write(self, record: HostRecord) -> None:
        # Bookkeeping is not enough: whoever commits a record that should be on disk may have missed it there.
        found = self._disk.find(record.key)
        if found is not None and found.num_tokens == record.num_tokens:
            self._finish(record, found)
            return
        header = self._disk.header_of(record.key, record.parent, record.num_tokens, record.namespace)
        with self._changed:
            known = self._disk.get(record.key)
            if known is not None:
                self._disk.forget(known)
            files = self._disk.make_room(header.file_nbytes)
            self._counts["disk_evictions"] += len(files or ())
        if files is None:
            self._finish(record, None)
            return
        for file in files:
            self._disk.delete(file)
        try:
            self._register(record.namespace)
            complete = self._disk.write(header, record.data)
        except OSError as error:
            self._fail(record, error)
        else:
            self._finish(record, complete, written=True)

    def _register(self, namespace: bytes) -> None:
        with self._changed:
            manifest = replace(self._manifest, namespaces=dict(self._manifest.namespaces))
        if namespace.hex() in manifest.namespaces and namespace.hex() not in self._registered:
            update_manifest(self._disk.path, manifest)
            self._registered = set(manifest.namespaces)

    def _finish(self, record: HostRecord, header: RecordHeader | None, *, written: bool = False) -> None:
        with self._changed:
            if header is not None:
                self._disk.adopt(header)
                if written:
                    self._counts["disk_writes"] += 1
                    self._written_bytes += header.file_nbytes
                    self._recover()
            self._host.unpin(record)

    def _fail(self, record: HostRecord, error: OSError) -> None:
        with self._changed:
            self._counts["write_errors"] += 1
            if not self.read_only:
                logger.warning(
                    "KV cache on disk: %s cannot be written (%s); it is only read until it can be",
                    self._disk.path,
                    error.strerror or error,
                )
                self._give_all_up()
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)
            self._host.unpin(record)
            self._changed.notify_all()

    def _give_all_up(self) -> None:
        self.read_only = True
        for record in self._queue.values():
            self._host.unpin(record)
        self._queue.clear()

    def _recover(self) -> None:
        if not self.read_only:
            return
        logger.info("KV cache on disk: %s can be written again", self._disk.path)
        self.read_only = False
        self._retry_s = FIRST_RETRY_S
        for record in self._lacking():
            self.enqueue(record)

    def _refresh_due(self) -> bool:
        aged = time.monotonic() - self._refreshed_at > REFRESH_INTERVAL_S
        return aged or self._written_bytes > self._disk.budget // REFRESH_SHARE

    def _refresh(self) -> None:
        """Make the bookkeeping agree with the directory, then the directory with the budget."""
        started = time.monotonic()
        seen: set[SegmentKey] = set()
        examined = self._disk.examine()
        while batch := list(islice(examined, BATCH)):
            if self._stopping:
                return
            seen.update(found.key for found, _ in batch)
            with self._changed:
                self._disk.adopt_all(batch)
        others = self._disk.list_others()
        with self._changed:
            self._disk.forget_unseen(seen, started)
            self._disk.note_others(others)
            files = self._disk.make_room(0) or []
            self._counts["disk_evictions"] += len(files)
            self._refreshed_at = time.monotonic()
            self._written_bytes = 0
        for file in files:
            self._disk.delete(file)
