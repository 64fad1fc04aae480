"""`KVStore`: the KV of one model and tensor-parallel rank, in host memory and perhaps on disk below it."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable

from daric_rag.engine.keys import KEY_BYTES, SegmentKey, Tier
from daric_rag.engine.metrics import StoreStats
from daric_rag.engine.storage.base import ReadHandle, RecordSpec, StoreEvent, WriteHandle, check_segment
from daric_rag.engine.storage.disk import DiskRecord, DiskTier
from daric_rag.engine.storage.host import HostRecord, HostTier, State
from daric_rag.engine.storage.loader import Load, Loader, Outcome
from daric_rag.engine.storage.manifest import Manifest
from daric_rag.engine.storage.record import namespace_digest
from daric_rag.engine.storage.write_behind import WriteBehind
from daric_rag.errors import EngineClosedError


class KVStore:
    """Holds segments as canonical records; safe to call from any thread, and no call waits for a write.

    `host_bytes` is the budget of this store's arena. With a disk tier up to `detached_bytes` more (default: as
    much again) hold records that find no room there while they are read, or until they are written.
    `disk_bytes` is the budget of `disk_path`, whatever models and engines keep there; of an engine's
    `num_ranks` ranks each keeps to its share of it. `model_id` and `namespace` (of records that are reserved
    without one) are for people: keys must tell both apart already.
    Raises `ValueError` for options or keys out of range, `CacheUnavailableError` for a location that cannot
    be used, `EngineClosedError` after `close`.
    """

    def __init__(
        self,
        spec: RecordSpec,
        *,
        host_bytes: int,
        detached_bytes: int | None = None,
        disk_path: str | None = None,
        disk_bytes: int = 0,
        model_id: str = "",
        rank: int = 0,
        num_ranks: int = 1,
        root: bytes,
        pin_memory: bool = False,
        namespace: str = "",
    ) -> None:
        _check_options(host_bytes, disk_path, disk_bytes, rank, root)
        self.spec = spec
        self.root = root
        self._namespace = namespace
        self._lock = threading.Lock()
        self._closed = False
        self._events: list[StoreEvent] = []
        self._counts: Counter[str] = Counter()
        self._pins = 0
        self._reservations = 0
        self._loads = 0
        # Handles that were dropped: a destructor may run anywhere, even under our lock, so it leaves a note.
        self._dropped_reads: deque[object] = deque()
        self._dropped_writes: deque[object] = deque()
        detached = host_bytes if detached_bytes is None else detached_bytes
        self._host = HostTier(
            spec,
            host_bytes,
            detached_budget=0 if disk_path is None else detached,
            pin_memory=pin_memory,
            events=self._events,
            counts=self._counts,
        )
        self._disk: DiskTier | None = None
        if disk_path is not None:
            self._disk = DiskTier(
                spec,
                path=disk_path,
                root=root,
                rank=rank,
                num_ranks=num_ranks,
                budget=disk_bytes,
                events=self._events,
            )
            manifest = Manifest(root, model_id, spec)
            self._loader = Loader(self._loaded)
            self._writer = WriteBehind(self._lock, self._host, self._disk, self._counts, manifest)
            self._writer.start()

    def reserve(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, *, namespace: str | None = None
    ) -> WriteHandle | None:
        """Space for a new record, invisible until `commit`; None if it cannot fit, or is in host memory.

        With a disk tier it also fits beside the arena, to be written from there.
        """
        check_segment(key, parent, num_tokens)
        namespace = self._namespace if namespace is None else namespace
        digest = namespace_digest(namespace)
        with self._lock:
            self._enter()
            record = self._reserve(key, parent, num_tokens, digest)
            if record is None:
                return None
            if self._disk is not None:
                self._writer.note_namespace(digest, namespace)
            self._reservations += 1
            return WriteHandle(key, num_tokens, record.data, record, self._dropped_writes.append)

    def commit(self, handle: WriteHandle) -> None:
        """Make a filled record visible; with a disk tier it is written there later, in the background."""
        with self._lock:
            self._enter()
            record, handle.record = handle.record, None
            if not isinstance(record, HostRecord):
                return
            self._reservations -= 1
            if self._disk is not None:
                self._writer.enqueue(record)
            self._host.publish(record)

    def abort(self, handle: WriteHandle) -> None:
        """Give the space of an unfinished record back."""
        with self._lock:
            record, handle.record = handle.record, None
            if isinstance(record, HostRecord):
                self._abort(record)

    def acquire(self, key: SegmentKey) -> ReadHandle | None:
        """The pinned record of `key`, or None for a miss; one on disk begins to be read, and so promoted.

        None also while there is no room to read it into, neither in the arena nor beside it (`no_room` of
        `stats`): such a record is not missing, and `contains` says so.
        """
        with self._lock:
            self._enter()
            handle = self._acquire(key)
            if handle is not None or self._disk is None or self._is_known(key):
                return self._count(key, handle)
        found = self._disk.find(key)  # not under the lock: this may wait for a disk
        with self._lock:
            self._enter()
            if found is not None:
                self._disk.adopt(found)
            return self._count(key, self._acquire(key))

    def release(self, handle: ReadHandle) -> None:
        """Unpin; a second call does nothing."""
        with self._lock:
            record, handle.record = handle.record, None
            if isinstance(record, HostRecord):
                self._release(record)

    def contains(self, key: SegmentKey) -> Tier | None:
        """The fastest tier that holds `key`; not a use of it."""
        with self._lock:
            self._enter()
            record = self._host.get(key)
            if record is not None and record.state is State.READY:
                return Tier.HOST
            if self._disk is None or self._disk.get(key) is not None:
                return None if self._disk is None else Tier.DISK
        return Tier.DISK if self._disk.find(key) is not None else None

    def disk_nbytes_of(self, keys: Iterable[SegmentKey]) -> int:
        """Bytes that `acquire` of all `keys` would have to read from disk, as far as is known without looking."""
        with self._lock:
            on_disk = (
                (self._disk.get(key) for key in keys if self._host.get(key) is None) if self._disk else ()
            )
            return sum(record.nbytes for record in on_disk if record is not None)

    def read_bytes_per_s(self) -> float | None:
        """What the disk has lately given while it was read from; None if unknown (see `ReadRate`)."""
        return None if self._disk is None else self._loader.rate.value()

    def drain_events(self) -> list[StoreEvent]:
        """What happened since the last call, in order."""
        with self._lock:
            events = self._events.copy()
            self._events.clear()
            return events

    def stats(self) -> StoreStats:
        """Counters so far."""
        with self._lock:
            self._sweep()
            counts = self._counts
            disk, writer = self._disk, self._writer if self._disk is not None else None
            return StoreStats(
                host_bytes=self._host.used_bytes,
                host_budget=self._host.arena.free_list.size,
                host_records=len(self._host),
                detached_bytes=self._host.detached_bytes,
                detached_budget=self._host.detached_budget,
                disk_bytes=disk.used_bytes if disk is not None else 0,
                disk_budget=disk.budget if disk is not None else 0,
                disk_records=len(disk) if disk is not None else 0,
                disk_other_bytes=disk.other_bytes if disk is not None else 0,
                pins=self._pins,
                reservations=self._reservations,
                host_hits=counts["host_hits"],
                disk_hits=counts["disk_hits"],
                misses=counts["misses"],
                no_room=counts["no_room"],
                evictions=counts["evictions"],
                disk_evictions=counts["disk_evictions"],
                promotions=counts["promotions"],
                disk_writes=counts["disk_writes"],
                pending_writes=writer.pending if writer is not None else 0,
                damaged=disk.damaged if disk is not None else 0,
                write_errors=counts["write_errors"],
                read_only=writer.read_only if writer is not None else False,
            )

    def flush(self, timeout: float) -> bool:
        """Wait until all loads have ended and everything is on disk that should be.

        False after `timeout` seconds, or if the disk cannot be written.
        """
        return self._disk is None or self._writer.flush(timeout, lambda: not self._loads)

    def close(self, timeout: float = 10.0) -> None:
        """Write what is left, `timeout` s at most, and stop; data of reading handles stays readable."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._disk is not None:
            deadline = time.monotonic() + timeout
            self._loader.close(timeout)
            self._writer.flush(deadline - time.monotonic(), lambda: True)
            self._writer.close(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._host.arena.close()

    def _enter(self) -> None:
        if self._closed:
            raise EngineClosedError("the KV store was closed")
        self._sweep()

    def _sweep(self) -> None:
        while self._dropped_writes:
            record = self._dropped_writes.popleft()
            if isinstance(record, HostRecord):
                self._abort(record)
        while self._dropped_reads:
            record = self._dropped_reads.popleft()
            if isinstance(record, HostRecord):
                self._release(record)

    def _abort(self, record: HostRecord) -> None:
        self._reservations -= 1
        self._host.discard(record)
        self._host.unpin(record)

    def _release(self, record: HostRecord) -> None:
        self._pins -= 1
        self._host.unpin(record)

    def _reserve(
        self, key: SegmentKey, parent: SegmentKey, num_tokens: int, namespace: bytes
    ) -> HostRecord | None:
        """Room in the arena, else beside it, else in place of older records that the disk is too slow for."""
        record = self._host.reserve(key, parent, num_tokens, namespace)
        if record is not None or self._disk is None or self._host.get(key) is not None:
            return record
        if not self._writer.read_only:
            record = self._host.detached(key, parent, num_tokens, namespace)
        while record is None and self._host.fits(num_tokens) and self._writer.give_up():
            record = self._host.reserve(key, parent, num_tokens, namespace)
        return record

    def _is_known(self, key: SegmentKey) -> bool:
        return self._host.get(key) is not None or (self._disk is not None and self._disk.get(key) is not None)

    def _acquire(self, key: SegmentKey) -> ReadHandle | None:
        record = self._host.get(key)
        if record is None and self._disk is not None:
            on_disk = self._disk.get(key)
            record = None if on_disk is None else self._load(on_disk)
        if record is None or record.state is State.WRITING:
            return None
        tier, arrival = (Tier.DISK, record.load) if record.state is State.LOADING else (Tier.HOST, None)
        self._host.pin(record)
        self._host.touch(record)
        if self._disk is not None:
            self._disk.touch(key)
        self._pins += 1
        return ReadHandle(
            key, record.num_tokens, tier, record.data, record, arrival, self._dropped_reads.append
        )

    def _count(self, key: SegmentKey, handle: ReadHandle | None) -> ReadHandle | None:
        name = "misses" if handle is None else f"{handle.tier}_hits"
        if handle is None and self._host.get(key) is None and self._is_known(key):
            name = "no_room"
        self._counts[name] += 1
        return handle

    def _load(self, on_disk: DiskRecord) -> HostRecord | None:
        """Start to read a record: into the arena, which promotes it, or beside it; None if there is no room."""
        assert self._disk is not None
        key, parent = on_disk.key, on_disk.parent
        num_tokens, namespace = on_disk.num_tokens, on_disk.namespace
        accesses = self._disk.accesses(key)
        record = self._host.reserve(key, parent, num_tokens, namespace, accesses=accesses)
        if record is None:
            record = self._host.detached(key, parent, num_tokens, namespace)
        if record is None:
            return None
        record.state = State.LOADING
        expected = self._disk.header_of(key, parent, num_tokens, namespace)
        load = Load(record, self._disk.file_of(key), expected, on_disk)
        record.load = load
        self._disk.pin(on_disk)
        self._loads += 1
        self._loader.submit(load)
        return record

    def _loaded(self, load: Load, outcome: Outcome) -> None:
        """A load ended, in a thread of the loader."""
        assert self._disk is not None
        record = load.record
        if outcome is Outcome.DAMAGED:
            self._disk.delete_damaged(record.key)
        with self._lock:
            record.load = None
            self._loads -= 1
            self._writer.wake()
            self._disk.unpin(load.on_disk)
            if outcome is Outcome.COMPLETE:
                self._counts["promotions"] += record.attached
                self._host.publish(record)
                return
            self._host.discard(record)
            self._host.unpin(record)
            # Also when the file is merely unreadable: forgotten, it can be written anew.
            self._disk.forget(load.on_disk)


def _check_options(host_bytes: int, disk_path: str | None, disk_bytes: int, rank: int, root: bytes) -> None:
    if host_bytes < 1:
        raise ValueError(f"host_bytes={host_bytes}: allowed is a positive number of bytes")
    if disk_path is not None and disk_bytes < 1:
        raise ValueError(f"disk_bytes={disk_bytes}: allowed with a disk_path is a positive number of bytes")
    if rank < 0:
        raise ValueError(f"rank={rank}: allowed is 0 or more")
    if len(root) != KEY_BYTES:
        raise ValueError(f"root={root!r}: allowed are {KEY_BYTES} bytes")
