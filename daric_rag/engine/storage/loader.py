"""Reading records from disk in threads, a few layers of each in turn, so that first layers arrive first."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
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
MAX_THREADS = 4
RATE_HALF_LIFE_S = 1.0
RATE_FORGOTTEN_S = 60.0


class Outcome(Enum):
    """How a load ended."""

    COMPLETE = auto()
    DAMAGED = auto()
    GONE = auto()
    UNREADABLE = auto()


class Load:
    """The progress of one record from a file into `record.data`."""

    def __init__(self, record: HostRecord, path: str, expected: RecordHeader, on_disk: DiskRecord) -> None:
        self.record = record
        self.path = path
        self.on_disk = on_disk
        self._expected = expected
        self._fd = -1
        self._header = expected
        self._ready_layers = 0
        self._failed = False
        self._changed = threading.Condition()

    def is_ready(self, layer: int) -> bool:
        """Whether `layer` is in memory and verified."""
        return self._ready_layers > layer

    def wait(self, layer: int, deadline: float | None) -> bool:
        """True once `layer` is in memory and verified; False if it will not be, or not by `deadline`."""
        timeout = None if deadline is None else deadline - time.monotonic()
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._failed or self._ready_layers > layer, timeout)
                and self._ready_layers > layer
            )

    @property
    def is_complete(self) -> bool:
        """Whether every layer is in memory and verified."""
        return self._ready_layers == self._header.spec.num_layers

    def step(self) -> int:
        """Read the next megabyte or so; returns its bytes. Raises `DamagedRecordError`, `OSError`."""
        if self._fd < 0:
            self._open()
        spec, first = self._header.spec, self._ready_layers
        layer_nbytes = spec.layer_nbytes(self._header.num_tokens)
        count = min(max(1, STEP_NBYTES // layer_nbytes), spec.num_layers - first)
        read_layers(self._fd, self._header, first, count, self.record.data)
        with self._changed:
            self._ready_layers += count
            self._changed.notify_all()
        return count * layer_nbytes

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
        self._header = read_header(self._fd)
        for name in ("key", "root", "spec", "num_tokens"):
            found, wanted = getattr(self._header, name), getattr(self._expected, name)
            if found != wanted:
                raise DamagedRecordError(f"{name} is {found!r}, not {wanted!r}")


class ReadRate:
    """Bytes a second over the time in which reads were under way, the last second of it weighing most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way = 0
        self._nbytes = self._seconds = 0.0
        self._at = 0.0

    def started(self) -> None:
        """A read is under way."""
        self._note(1, 0)

    def read(self, nbytes: int) -> None:
        """So much of one has arrived."""
        self._note(0, nbytes)

    def ended(self) -> None:
        """A read is over, however it went."""
        self._note(-1, 0)

    def _note(self, change: int, nbytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._under_way:
                elapsed = now - self._at
                kept = 0.5 ** (elapsed / RATE_HALF_LIFE_S)
                self._nbytes *= kept
                self._seconds = self._seconds * kept + elapsed
            self._at = now
            self._under_way += change
            self._nbytes += nbytes

    def value(self) -> float | None:
        """The rate, down to 0 while a disk stalls; None while too little is known, or it is a minute old."""
        if self._under_way:
            self._note(0, 0)
        with self._lock:
            known = self._nbytes > 0 or self._seconds > RATE_HALF_LIFE_S
            if not known or time.monotonic() - self._at > RATE_FORGOTTEN_S:
                return None
            return self._nbytes / max(self._seconds, 1e-6)


class Loader:
    """A few threads that take turns among all loads; `on_done` is called once for each, in one of them."""

    def __init__(self, on_done: Callable[[Load, Outcome], None]) -> None:
        self._on_done = on_done
        self._turns: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._closing = False
        self.rate = ReadRate()
        # Daemons: a disk that never answers must not keep the process.
        self._threads = [
            threading.Thread(target=self._run, name=f"daric-kv-read-{number}", daemon=True)
            for number in range(min(MAX_THREADS, os.cpu_count() or 1))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, load: Load) -> None:
        """Start a load."""
        self.rate.started()
        self._turns.put(load)

    def close(self, timeout: float) -> None:
        """Let the turns that are under way end, `timeout` seconds at most; what would need another fails."""
        self._closing = True
        deadline = time.monotonic() + timeout
        for _ in self._threads:
            self._turns.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while not self._turns.empty():
            load = self._turns.get()
            if load is not None:
                self._finish(load, Outcome.UNREADABLE)

    def _run(self) -> None:
        while (load := self._turns.get()) is not None:
            outcome = Outcome.UNREADABLE if self._closing else self._turn(load)
            if outcome is None:
                self._turns.put(load)
            else:
                self._finish(load, outcome)

    def _turn(self, load: Load) -> Outcome | None:
        """Go on with a load; None if it needs another turn."""
        try:
            self.rate.read(load.step())
            return Outcome.COMPLETE if load.is_complete else None
        except DamagedRecordError as error:
            logger.debug("damaged KV record %s: %s", load.path, error)
            return Outcome.DAMAGED
        except FileNotFoundError:
            return Outcome.GONE
        except Exception as error:  # whatever happens, nobody is left waiting
            logger.debug("unreadable KV record %s: %s", load.path, error)
            return Outcome.UNREADABLE

    def _finish(self, load: Load, outcome: Outcome) -> None:
        self.rate.ended()
        try:
            self._on_done(load, outcome)  # first: who is told of a failure may save the record anew at once
        except Exception:
            logger.exception("KV record %s", load.path)
        finally:
            load.end(failed=outcome is not Outcome.COMPLETE)
