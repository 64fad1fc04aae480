"""Records on disk: what this engine knows of a directory that it may share with others, and its budget."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.storage.base import Bytes, RecordSpec, StoreEvent
from daric_rag.engine.storage.directory import (
    FoundFile,
    check_header,
    list_ranks,
    list_records,
    list_roots,
    prepare_directory,
    record_path,
    remove_orphans,
    stamp,
    write_record,
)
from daric_rag.engine.storage.policy import EvictionPolicy
from daric_rag.engine.storage.record import DamagedRecordError, RecordHeader, layer_checksums

STAMP_INTERVAL_S = 60.0
"""How far the times of last use may lie behind."""


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
    """The records of one root and rank below `path`, and the budget of all that lies there.

    The budget is that of a directory for all models and ranks. Of the ranks of one engine each keeps to its
    share of it, by minding every `num_ranks`-th rank directory of all roots: where the own records are known
    one by one, the others' files are listed from time to time, and what was used least recently goes first.

    Bookkeeping (`get` to `stamps_of`) is done under the lock of `KVStore`; what touches the disk (`find`
    onwards) without it. Files are the truth, the bookkeeping an estimate of it: other engines add and delete
    files too.
    Raises `CacheUnavailableError` if the directory cannot be made or written.
    """

    def __init__(
        self,
        spec: RecordSpec,
        *,
        path: str,
        root: bytes,
        rank: int,
        num_ranks: int,
        budget: int,
        events: list[StoreEvent],
    ) -> None:
        self.spec = spec
        self.path = path
        self.root = root
        self.rank = rank
        self.budget = budget // num_ranks
        self.used_bytes = 0
        self.other_bytes = 0
        self.damaged = 0
        self._num_ranks = num_ranks
        self._counting = threading.Lock()
        self._events = events
        self._policy = EvictionPolicy()
        self._records: dict[SegmentKey, DiskRecord] = {}
        self._others: list[FoundFile] = []  # the next to go last
        self._used: set[SegmentKey] = set()  # since the files were last stamped
        self._gone: set[SegmentKey] = set()  # since `examine` began: what it has seen of them is out of date
        prepare_directory(path, root, rank)
        for each in list_roots(path):
            for found in list_ranks(path, each):
                remove_orphans(path, each, found)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: SegmentKey) -> DiskRecord | None:
        """What is known of the record of `key`."""
        return self._records.get(key)

    def accesses(self, key: SegmentKey) -> int:
        """How often a known record was used, as far as that counts."""
        return self._policy.accesses(key)

    def adopt(self, header: RecordHeader, found: FoundFile | None = None) -> None:
        """Account for a file that is there, as `examine` found it, or as just written or used.

        Nothing happens if it was accounted for already, or is known to have gone since it was examined.
        """
        if header.key in self._records or (found is not None and header.key in self._gone):
            return
        last_access, accesses = (time.time(), 1) if found is None else (found.last_access, found.accesses)
        record = DiskRecord(
            header.key,
            header.parent,
            header.num_tokens,
            header.namespace,
            header.file_nbytes,
            last_access,
            time.monotonic(),
        )
        self._records[record.key] = record
        self._policy.add(record.key, record.parent, accesses=accesses)
        self.used_bytes += record.nbytes
        self._events.append(StoreEvent("added", record.key, Tier.DISK))

    def adopt_all(self, examined: Iterable[tuple[FoundFile, RecordHeader | None]]) -> None:
        """Account for files in the order of `examine`; a known one may have been used by another engine."""
        for found, header in examined:
            known = self._records.get(found.key)
            if known is None and header is not None:
                self.adopt(header, found)
            elif known is not None and found.last_access > known.last_access + STAMP_INTERVAL_S:
                self._policy.touch(known.key)
                known.last_access = found.last_access

    def forget(self, record: DiskRecord) -> None:
        """Stop to account for a file that is gone or about to be."""
        if self._records.get(record.key) is not record:
            return
        del self._records[record.key]
        self._gone.add(record.key)
        self._policy.remove(record.key)
        self.used_bytes -= record.nbytes
        self._events.append(StoreEvent("removed", record.key, Tier.DISK))

    def forget_unseen(self, seen: set[SegmentKey], since: float) -> None:
        """Forget what was there before `since` (monotonic) and was not seen."""
        for record in list(self._records.values()):
            if record.key not in seen and record.added < since:
                self.forget(record)

    def touch(self, key: SegmentKey) -> None:
        """Note a use of the record of `key`, from whatever tier, if it is here."""
        record = self._records.get(key)
        if record is not None:
            self._policy.touch(key)
            record.last_access = time.time()
            self._used.add(key)

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
        while self.used_bytes + self.other_bytes + nbytes > self.budget:
            victim = self._policy.victim()
            own = None if victim is None else self._records[victim]
            if self._others and (own is None or self._others[-1].last_access < own.last_access):
                other = self._others.pop()
                self.other_bytes -= other.nbytes
                files.append(other.path)
            elif own is not None:
                self.forget(own)
                files.append(self.file_of(own.key))
            else:
                break
        return files

    def note_others(self, others: list[FoundFile]) -> None:
        """Account for the files of other roots and ranks, as `list_others` found them."""
        self._others = others
        self.other_bytes = sum(file.nbytes for file in others)

    def take_used(self) -> set[SegmentKey]:
        """The records used since the last call."""
        used, self._used = self._used, set()
        return used

    def stamps_of(self, keys: Iterable[SegmentKey]) -> list[tuple[SegmentKey, float, int]]:
        """(key, last access, accesses) of those that are known, for `stamp`."""
        records = (self._records[key] for key in keys if key in self._records)
        return [(record.key, record.last_access, self.accesses(record.key)) for record in records]

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

    def stamp(self, stamps: list[tuple[SegmentKey, float, int]]) -> None:
        """Tell the files how their records were used."""
        for key, last_access, accesses in stamps:
            stamp(self.file_of(key), last_access, accesses)

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

    def examine(self) -> Iterator[tuple[FoundFile, RecordHeader | None]]:
        """Every own file with its header, least recently used first.

        The header is None for a record known already. A damaged file is deleted and left out.
        """
        self._gone.clear()
        files = sorted(list_records(self.path, self.root, self.rank), key=lambda file: file.last_access)
        self._policy.min_turn = len(files)
        for found in files:
            if found.key in self._records:
                yield found, None
                continue
            try:
                header = check_header(found.path, self.root, found.key)
            except OSError:
                continue
            except DamagedRecordError:
                self.delete_damaged(found.key)
                continue
            if header.spec == self.spec:
                yield found, header

    def list_others(self) -> list[FoundFile]:
        """The files of other roots and ranks that this tier minds, least recently used last.

        Of what was used in the same minute the last written goes first: it is the end of a chunk, no use
        without its beginning.
        """
        others = [
            file
            for root in list_roots(self.path)
            for rank in list_ranks(self.path, root)
            if rank % self._num_ranks == self.rank % self._num_ranks
            and (root, rank) != (self.root, self.rank)
            for file in list_records(self.path, root, rank)
        ]
        others.sort(key=lambda file: (-(file.last_access // 60), file.last_access))
        return others
