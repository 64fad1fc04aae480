"""Records on disk: what this engine knows of a directory that it may share with others, and its budget."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.storage.base import Bytes, RecordSpec
from daric_rag.engine.storage.directory import (
    check_header,
    list_records,
    prepare_directory,
    record_path,
    remove_orphans,
    write_record,
)
from daric_rag.engine.storage.policy import EvictionPolicy
from daric_rag.engine.storage.record import DamagedRecordError, RecordHeader, layer_checksums

TOUCH_INTERVAL_S = 60.0


@dataclass(slots=True, eq=False)
class DiskRecord:
    """One file; `last_access` in seconds since the epoch, `added` on the monotonic clock."""

    key: SegmentKey
    parent: SegmentKey
    num_tokens: int
    namespace: bytes
    nbytes: int
    last_access: float
    added: float


class DiskTier:
    """The records of one root and rank below `path`.

    Bookkeeping (`get` to `make_room`) is done under the lock of `KVStore`; what touches the disk (`find`
    onwards) without it. Files are the truth, the bookkeeping an estimate of it: other engines add and delete
    files too. `on_removed` is called for every record that leaves the bookkeeping.
    Raises `CacheUnavailableError` if the directory cannot be made or written.
    """

    def __init__(
        self,
        spec: RecordSpec,
        *,
        path: str,
        root: bytes,
        rank: int,
        budget: int,
        on_removed: Callable[[DiskRecord], None],
    ) -> None:
        self.spec = spec
        self.path = path
        self.root = root
        self.rank = rank
        self.budget = budget
        self.used_bytes = 0
        self.damaged = 0
        self._counting = threading.Lock()
        self._on_removed = on_removed
        self._policy = EvictionPolicy()
        self._records: dict[SegmentKey, DiskRecord] = {}
        self._gone: set[SegmentKey] = set()  # since `examine` began: what it has seen of them is out of date
        prepare_directory(path, root, rank)
        remove_orphans(path, root, rank)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: SegmentKey) -> DiskRecord | None:
        """What is known of the record of `key`."""
        return self._records.get(key)

    def records(self) -> list[DiskRecord]:
        """All known records."""
        return list(self._records.values())

    def adopt(self, header: RecordHeader, last_access: float | None = None) -> DiskRecord | None:
        """Account for a file that is there, with its `last_access` if `examine` found it.

        None if it was accounted for already, or is known to have gone since it was examined.
        """
        if header.key in self._records or (last_access is not None and header.key in self._gone):
            return None
        record = DiskRecord(
            header.key,
            header.parent,
            header.num_tokens,
            header.namespace,
            header.file_nbytes,
            time.time() if last_access is None else last_access,
            time.monotonic(),
        )
        self._records[record.key] = record
        self._policy.add(record.key, record.parent)
        self.used_bytes += record.nbytes
        return record

    def forget(self, record: DiskRecord) -> None:
        """Stop to account for a file that is gone or about to be."""
        if self._records.get(record.key) is not record:
            return
        del self._records[record.key]
        self._gone.add(record.key)
        self._policy.remove(record.key)
        self.used_bytes -= record.nbytes
        self._on_removed(record)

    def touch(self, record: DiskRecord, now: float) -> bool:
        """Note a use at `now`; True if the file's own time should be brought up to date."""
        self._policy.touch(record.key)
        stale = now - record.last_access > TOUCH_INTERVAL_S
        if stale:
            record.last_access = now
        return stale

    def pin(self, record: DiskRecord) -> None:
        """Do not evict the record while it is read."""
        self._policy.pin(record.key)

    def unpin(self, record: DiskRecord) -> None:
        """Undo one pin, if the record is still known."""
        if self._records.get(record.key) is record:
            self._policy.unpin(record.key)

    def make_room(self, nbytes: int) -> list[str] | None:
        """Forget records until `nbytes` fit the budget; their files, to be deleted. None: never fits."""
        files: list[str] = []
        if nbytes > self.budget:
            return None
        while self.used_bytes + nbytes > self.budget:
            victim = self._policy.victim()
            if victim is None:
                break
            self.forget(self._records[victim])
            files.append(self.file_of(victim))
        return files

    def file_of(self, key: SegmentKey) -> str:
        """The path of the record of `key`, whether it exists or not."""
        return record_path(self.path, self.root, self.rank, key)

    def header_of(
        self,
        key: SegmentKey,
        parent: SegmentKey,
        num_tokens: int,
        namespace: bytes,
        checksums: tuple[int, ...] = (),
    ) -> RecordHeader:
        """The header that a record of this tier must have."""
        return RecordHeader(self.root, key, parent, namespace, self.spec, num_tokens, checksums)

    def find(self, key: SegmentKey) -> RecordHeader | None:
        """The header of a file whatever the bookkeeping says: another engine may have written it."""
        try:
            header = check_header(self.file_of(key), self.root, key)
            if header.spec != self.spec:
                raise DamagedRecordError(f"{header.spec}, not {self.spec}")
        except OSError:
            return None
        except DamagedRecordError:
            self.delete_damaged(key)
            return None
        return header

    def write(self, header: RecordHeader, payload: Bytes) -> RecordHeader:
        """Write a record; returns its full header, with checksums. Raises `OSError`."""
        checksums = layer_checksums(self.spec, header.num_tokens, payload)
        complete = self.header_of(header.key, header.parent, header.num_tokens, header.namespace, checksums)
        write_record(self.path, self.rank, complete, payload)
        return complete

    def delete(self, file: str) -> bool:
        """Delete a file that may be gone already; whether it was this call that did it."""
        try:
            os.unlink(file)
        except OSError:
            return False
        return True

    def delete_damaged(self, key: SegmentKey) -> None:
        """Delete a damaged file; several threads may find it, one of them counts it."""
        self._gone.add(key)
        if self.delete(self.file_of(key)):
            with self._counting:
                self.damaged += 1

    def examine(self) -> Iterator[tuple[SegmentKey, float, RecordHeader | None]]:
        """`(key, last_access, header)` of every file, least recently used first.

        The header is None for a record known already. A damaged file is deleted and left out.
        """
        self._gone.clear()
        for found in sorted(list_records(self.path, self.root, self.rank), key=lambda file: file.last_access):
            if found.key in self._records:
                yield found.key, found.last_access, None
                continue
            try:
                header = check_header(found.path, self.root, found.key)
            except OSError:
                continue
            except DamagedRecordError:
                self.delete_damaged(found.key)
                continue
            if header.spec == self.spec:
                yield found.key, found.last_access, header
