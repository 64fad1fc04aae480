"""Where records lie on disk, `<disk_path>/<root>/<rank>/<ab>/<key>.kv`, and how they get there whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.storage.base import Bytes
from daric_rag.engine.storage.policy import MAX_ACCESSES
from daric_rag.engine.storage.record import (
    SUFFIX,
    DamagedRecordError,
    RecordHeader,
    open_record,
    read_header,
    write_all,
)
from daric_rag.errors import CacheUnavailableError

_RECORD_NAME = re.compile(r"[0-9a-f]{64}\.kv")
_ROOT_NAME = re.compile(r"[0-9a-f]{64}")
_TEMPORARY_NAME = re.compile(r"(\d+)-(\d+)-\d+-\d+\.tmp")
_temporary_numbers = itertools.count()
_SECOND_NS = 1_000_000_000
_ACCESS_NS = 1_000_000


def root_directory(path: str, root: bytes) -> str:
    """The directory of everything under one root key."""
    return os.path.join(path, root.hex())


def rank_directory(path: str, root: bytes, rank: int) -> str:
    """The directory of one tensor-parallel rank's records."""
    return os.path.join(path, root.hex(), str(rank))


def record_path(path: str, root: bytes, rank: int, key: SegmentKey) -> str:
    """The file that holds `key`, whether it exists or not."""
    name = key.hex()
    return os.path.join(path, root.hex(), str(rank), name[:2], name + SUFFIX)


def probe_record(path: str, root: bytes, rank: int, key: SegmentKey) -> int | None:
    """Tokens of the record of `key` if there is a sound header, else None; reads at most a few pages."""
    header = load_header(record_path(path, root, rank, key), root, key)
    return None if header is None else header.num_tokens


def load_header(file: str, root: bytes, key: SegmentKey) -> RecordHeader | None:
    """The header of `file` if it is the record of `key` under `root`, else None."""
    try:
        return check_header(file, root, key)
    except (OSError, DamagedRecordError):
        return None


def check_header(file: str, root: bytes, key: SegmentKey) -> RecordHeader:
    """The same; raises `DamagedRecordError` if it is something else, `OSError` if it cannot be read."""
    fd = open_record(file)
    try:
        header = read_header(fd)
    finally:
        os.close(fd)
    if header.key != key or header.root != root:
        raise DamagedRecordError(f"record of key {header.key.hex()} under root {header.root.hex()}")
    return header


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that bears a record's name; `last_access` in seconds since the epoch, `accesses` as `stamp` left it."""

    key: SegmentKey
    path: str
    nbytes: int
    last_access: float
    accesses: int = 1


def list_records(path: str, root: bytes, rank: int) -> Iterator[FoundFile]:
    """All files named like records, unopened; those that vanish meanwhile are left out."""
    top = rank_directory(path, root, rank)
    for prefix in range(256):
        directory = os.path.join(top, f"{prefix:02x}")
        try:
            entries = os.scandir(directory)
        except OSError:
            continue
        with entries:
            for entry in entries:
                if not _RECORD_NAME.fullmatch(entry.name) or not entry.name.startswith(f"{prefix:02x}"):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    key = bytes.fromhex(entry.name.removesuffix(SUFFIX))
                    accesses, rest = divmod(status.st_mtime_ns % _SECOND_NS, _ACCESS_NS)
                    if rest or not 1 <= accesses <= MAX_ACCESSES:  # no stamp: the time of writing
                        accesses = 1
                    yield FoundFile(key, entry.path, status.st_size, status.st_mtime, accesses)


def stamp(file: str, last_access: float, accesses: int) -> None:
    """Keep for later engines when a record was last used, and how often, in its file's modification time.

    The count takes the place of the milliseconds; a file system that keeps whole seconds only forgets it.
    """
    with contextlib.suppress(OSError):
        at = int(last_access) * _SECOND_NS + accesses * _ACCESS_NS
        os.utime(file, ns=(at, at), follow_symlinks=False)


def stored_keys(path: str, root: bytes, num_ranks: int) -> set[SegmentKey]:
    """The keys of which every rank has a file, going by names: what a file is worth shows when it is read."""
    ranks = ({found.key for found in list_records(path, root, rank)} for rank in range(num_ranks))
    return set.intersection(*ranks)


def is_stored(path: str, root: bytes, num_ranks: int, key: SegmentKey) -> bool:
    """Whether every rank has a sound header of `key`; reads at most a few pages of each."""
    return all(probe_record(path, root, rank, key) is not None for rank in range(num_ranks))


def write_record(path: str, rank: int, header: RecordHeader, payload: Bytes) -> None:
    """Write one record: under its name it is whole or absent, whatever happens. Raises `OSError`."""
    target = record_path(path, header.root, rank, header.key)
    temporary = _temporary_path(path, header.root, rank)
    fd = _create(temporary)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_all(fd, header.pack(), payload)
        _replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def _create(file: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(file, flags, 0o666)
    except FileNotFoundError:  # somebody cleared the whole directory
        os.makedirs(os.path.dirname(file), exist_ok=True)
        return os.open(file, flags, 0o666)


def _replace(temporary: str, target: str) -> None:
    try:
        os.replace(temporary, target)
    except FileNotFoundError:  # the first record with this prefix
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(temporary, target)


def _temporary_path(path: str, root: bytes, rank: int) -> str:
    number = next(_temporary_numbers)
    pid = os.getpid()
    name = f"{pid}-{process_start_time(pid)}-{threading.get_native_id()}-{number}.tmp"
    return os.path.join(rank_directory(path, root, rank), "tmp", name)


def process_start_time(pid: int) -> int:
    """Start of a process in clock ticks since boot; 0 if there is none, or only its status is left, or no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *values = file.read().rsplit(b")", 1)[1].split()
            return 0 if state in (b"Z", b"X") else int(values[18])
    except (OSError, IndexError, ValueError):
        return 0


def process_is_running(pid: int, start_time: int) -> bool:
    """Whether this very process is still there, not another one that has its number; False for start time 0."""
    return bool(start_time) and process_start_time(pid) == start_time


def prepare_directory(path: str, root: bytes, rank: int) -> None:
    """Make the directory of a rank, and be sure that it can be written. Raises `CacheUnavailableError`."""
    temporaries = os.path.join(rank_directory(path, root, rank), "tmp")
    try:
        os.makedirs(temporaries, exist_ok=True)
        probe = _temporary_path(path, root, rank)
        os.close(_create(probe))
        os.unlink(probe)
    except OSError as error:
        # A disk that is full now may have room later; one that refuses us will not.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise CacheUnavailableError(
                f"disk_path={path!r} cannot be written ({error.strerror}: {error.filename}); "
                "use a writable directory, or leave disk_path out"
            ) from error


def remove_orphans(path: str, root: bytes, rank: int) -> int:
    """Delete temporaries of processes that are no more; returns how many."""
    removed = 0
    with (
        contextlib.suppress(OSError),
        os.scandir(os.path.join(rank_directory(path, root, rank), "tmp")) as files,
    ):
        for entry in files:
            match = _TEMPORARY_NAME.fullmatch(entry.name)
            if match and _is_orphan(entry.path, int(match[1]), int(match[2])):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    removed += 1
    return removed


def _is_orphan(file: str, pid: int, start_time: int) -> bool:
    """Whether the writer is dead: no such process, and no lock (a writer in another container has one)."""
    if process_is_running(pid, start_time):
        return False
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def list_roots(path: str) -> list[bytes]:
    """The root keys that have a directory below `path`."""
    try:
        names = sorted(os.listdir(path))
    except FileNotFoundError:
        return []
    return [bytes.fromhex(name) for name in names if _ROOT_NAME.fullmatch(name)]


def list_ranks(path: str, root: bytes) -> list[int]:
    """The ranks that have a directory below a root."""
    try:
        names = os.listdir(root_directory(path, root))
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())
