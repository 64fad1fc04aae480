"""Both tiers against a dictionary: what was saved comes back as it was, or is a miss that was announced."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.scheduler_side import SchedulerSide
from daric_rag.engine.storage import KVStore, ReadHandle, StoreEvent, WriteHandle, record_path
from tests.storage_support import ROOT, SPEC, is_intact, key_of, load, open_store, payload_of, record_files

CHUNKS, LENGTH = 6, 3
NUMBERS = st.integers(0, CHUNKS * LENGTH - 1)
FILE_NBYTES = 4096 + SPEC.payload_nbytes(16)
HOST_RECORDS, DISK_RECORDS = 5, 9


def parent_of(number: int) -> bytes:
    return key_of(number - 1) if number % LENGTH else ROOT


class HostMachine(RuleBasedStateMachine):
    """`mirror` is what the events say; the scheduler's index, which hears them too, must say the same."""

    writing = Bundle("writing")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.mirror: dict[bytes, str] = {}
        self.scheduler = SchedulerSide(MemoryIndex(), 16)
        self.num_reading = 0
        self.num_writing = 0
        self.store = self.open()

    def open(self) -> KVStore:
        return open_store(records=HOST_RECORDS)

    def settle(self) -> None:
        """Nothing moves and every event has been heard."""
        for event in self.store.drain_events():
            self.hear(event)

    def hear(self, event: StoreEvent) -> None:
        leaves_host = self.mirror.get(event.key) == "host" and (event.kind, event.tier) != ("added", "host")
        if leaves_host:
            children = [key for key, parent in PARENTS.items() if parent == event.key]
            assert all(self.mirror.get(child) != "host" for child in children), "parent evicted before child"
        self.scheduler.apply([], [event])
        if event.kind == "removed":
            self.mirror.pop(event.key, None)
        else:
            self.mirror[event.key] = event.tier

    @rule(target=writing, number=NUMBERS)
    def reserve(self, number: int) -> WriteHandle | None:
        self.settle()
        handle = self.store.reserve(key_of(number), parent_of(number), 16)
        if self.mirror.get(key_of(number)) == "host":
            assert handle is None
        if handle is not None:
            self.num_writing += 1
            handle.data[:] = payload_of(handle.key, 16)
        return handle

    @rule(handle=consumes(writing))
    def commit(self, handle: WriteHandle | None) -> None:
        if handle is not None:
            self.num_writing -= 1
            self.store.commit(handle)
            assert self.store.contains(handle.key) == "host"

    @rule(handle=consumes(writing))
    def abort(self, handle: WriteHandle | None) -> None:
        if handle is not None:
            self.num_writing -= 1
            handle.data[:] = 0xFF
            self.store.abort(handle)

    @rule(target=reading, number=NUMBERS)
    def acquire(self, number: int) -> ReadHandle | None:
        self.settle()
        expected = self.mirror.get(key_of(number))
        handle = self.store.acquire(key_of(number))
        assert (handle is not None) == (expected is not None)
        if handle is not None:
            self.num_reading += 1
            assert is_intact(handle)
        return handle

    @rule(handle=consumes(reading))
    def release(self, handle: ReadHandle | None) -> None:
        if handle is not None:
            self.num_reading -= 1
            assert is_intact(handle), "bytes changed while they were pinned"
            self.store.release(handle)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        self.settle()
        assert load(self.store, key_of(number)) == (key_of(number) in self.mirror)

    @invariant()
    def budgets_and_counts_hold(self) -> None:
        stats = self.store.stats()
        assert stats.host_bytes <= stats.host_budget and stats.disk_bytes <= stats.disk_budget
        assert (stats.pins, stats.reservations) == (self.num_reading, self.num_writing)

    @rule()
    def index_is_right(self) -> None:
        self.settle()
        found = self.scheduler.index.lookup([[key] for key in PARENTS])
        for key, depth in zip(PARENTS, found, strict=True):
            assert self.store.contains(key) == self.mirror.get(key)
            assert depth == (key in self.mirror)

    def teardown(self) -> None:
        self.store.close()


PARENTS = {key_of(number): parent_of(number) for number in range(CHUNKS * LENGTH)}


class DiskMachine(HostMachine):
    """The same with files below, which are also spoilt, and with restarts."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        super().__init__()

    def open(self) -> KVStore:
        return open_store(self.path, records=HOST_RECORDS, disk_bytes=DISK_RECORDS * FILE_NBYTES)

    def settle(self) -> None:
        assert self.store.flush(20)
        super().settle()

    @rule(number=NUMBERS, position=st.sampled_from(range(0, FILE_NBYTES, 41)), change=st.integers(1, 255))
    def spoil(self, number: int, position: int, change: int) -> None:
        self.settle()
        file = Path(record_path(str(self.path), ROOT, 0, key_of(number)))
        if not file.exists():
            return
        sound = file.read_bytes()
        data = bytearray(sound)
        data[position] ^= change
        file.write_bytes(data)
        in_host = self.mirror[key_of(number)] == "host"
        damaged = self.store.stats().damaged
        assert load(self.store, key_of(number)) == in_host
        self.settle()
        if in_host:  # nobody looks at the file
            file.write_bytes(sound)
        else:
            assert key_of(number) not in self.mirror and not file.exists()
            assert self.store.stats().damaged == damaged + 1

    @precondition(lambda self: not self.num_reading and not self.num_writing)
    @rule()
    def restart(self) -> None:
        self.settle()
        files = {file.stem for file in record_files(self.path)}
        self.store.close()
        self.store = self.open()
        self.mirror = {}
        self.scheduler = SchedulerSide(MemoryIndex(), 16)
        self.settle()
        assert {key.hex() for key in self.mirror} == files

    @invariant()
    def directory_keeps_to_its_budget(self) -> None:
        assert len(record_files(self.path)) <= DISK_RECORDS

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


TestHostTier = HostMachine.TestCase
TestHostTier.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestBothTiers = DiskMachine.TestCase
TestBothTiers.settings = settings(
    max_examples=15, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
