"""Reading records from disk in threads, a few layers of each in turn, so that first layers arrive first."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, auto

from daric_rag.engine.storage.disk import DiskRecord
from daric_rag.engine.storage.host import HostRecord
from daric_rag.engine.storage.record import (
    DamagedRecordError,
    RecordHeader,
    open_record,
    read_header,
    read_layers,
)

logger = logging.getLogger(__name__)

STEP_NBYTES = 1 << 20
STALL_S = 30.0


class Outcome(Enum):
    """How a turn of a load ended."""

    UNFINISHED = auto()
    COMPLETE = auto()
    DAMAGED = auto()
    GONE = auto()
    UNREADABLE = auto()


class Load:
    """The progress of one record from a file into `record.data`; `touch_file` marks the file as used."""

    def __init__(
        self, record: HostRecord, path: str, expected: RecordHeader, on_disk: DiskRecord, *, touch_file: bool
    ) -> None:
        self.record = record
        self.path = path
        self.on_disk = on_disk
        self._touch_file = touch_file
        self._expected = expected
        self._fd = -1
        self._header = expected
        self._ready_layers = 0
        self._failed = False
        self._changed = threading.Condition()

    def is_ready(self, layer: int) -> bool:
        """Whether `layer` is in memory and verified."""
        return self._ready_layers > layer

    def wait(self, layer: int) -> bool:
        """True once `layer` is in memory and verified; False if it will not be, or nothing moves for 30 s."""
        if self._ready_layers > layer:
            return True
        with self._changed:
            while not self._failed and self._ready_layers <= layer:
                if not self._changed.wait(STALL_S):
                    return False
            return self._ready_layers > layer

    def step(self) -> bool:
        """Read the next megabyte or so; True if there is more. Raises `DamagedRecordError`, `OSError`."""
        if self._fd < 0:
            self._open()
        spec, first = self._header.spec, self._ready_layers
        step_layers = max(1, STEP_NBYTES // spec.layer_nbytes(self._header.num_tokens))
        count = min(step_layers, spec.num_layers - first)
        read_layers(self._fd, self._header, first, count, self.record.data)
        with self._changed:
            self._ready_layers += count
            self._changed.notify_all()
        return self._ready_layers < spec.num_layers

    def end(self, *, failed: bool) -> None:
        """Close the file; after a failure nobody waits any longer."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if failed:
            with self._changed:
                self._failed = True
                self._changed.notify_all()

    def _open(self) -> None:
        self._fd = open_record(self.path)
        if self._touch_file:
            with contextlib.suppress(OSError):
                os.utime(self._fd)
        self._header = read_header(self._fd)
        for name in ("key", "root", "spec", "num_tokens"):
            found, wanted = getattr(self._header, name), getattr(self._expected, name)
            if found != wanted:
                raise DamagedRecordError(f"{name} is {found!r}, not {wanted!r}")


class Loader:
    """A few threads that take turns among all loads; `on_done` is called once for each, in one of them."""

    def __init__(self, on_done: Callable[[Load, Outcome], None]) -> None:
        self._on_done = on_done
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="daric-kv-read")

    def submit(self, load: Load) -> None:
        """Start, or go on with, a load."""
        try:
            self._pool.submit(self._turn, load)
        except RuntimeError:  # closed meanwhile
            self._finish(load, Outcome.UNREADABLE)

    def close(self) -> None:
        """Let the turns that have been handed out end; loads that would need another fail."""
        self._pool.shutdown(wait=True)

    def _turn(self, load: Load) -> None:
        outcome = Outcome.UNREADABLE
        try:
            outcome = Outcome.UNFINISHED if load.step() else Outcome.COMPLETE
        except DamagedRecordError as error:
            logger.debug("damaged KV record %s: %s", load.path, error)
            outcome = Outcome.DAMAGED
        except FileNotFoundError:
            outcome = Outcome.GONE
        except OSError as error:
            logger.debug("unreadable KV record %s: %s", load.path, error)
        finally:  # whatever happens, nobody is left waiting
            if outcome is Outcome.UNFINISHED:
                self.submit(load)
            else:
                self._finish(load, outcome)

    def _finish(self, load: Load, outcome: Outcome) -> None:
        try:
            self._on_done(load, outcome)  # first: who is told of a failure may save the record anew at once
        finally:
            load.end(failed=outcome is not Outcome.COMPLETE)
