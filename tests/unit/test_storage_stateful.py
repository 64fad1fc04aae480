"""Both tiers against a dictionary: what was saved comes back as it was, or is a miss that was announced."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from daric_rag.engine.keys import Tier
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.scheduler_side import SchedulerSide
from daric_rag.engine.storage import KVStore, ReadHandle, StoreEvent, WriteHandle
from tests.storage_support import (
    ROOT,
    SPEC,
    is_intact,
    key_of,
    load,
    open_store,
    payload_of,
    record_files,
    save,
)

CHUNKS, LENGTH = 6, 3
NUMBERS = st.integers(0, CHUNKS * LENGTH - 1)
HOST_RECORDS, HOST_RECORDS_WITH_DISK, DETACHED_RECORDS, DISK_RECORDS = 5, 2, 1, 9
NBYTES = SPEC.payload_nbytes(16)
FILE_NBYTES = 4096 + NBYTES


def parent_of(number: int) -> bytes:
    return key_of(number - 1) if number % LENGTH else ROOT


class HostMachine(RuleBasedStateMachine):
    """`mirror` is what the events say: the tiers of each key. The scheduler's index hears them too and must agree."""

    writing = Bundle("writing")
    reading = Bundle("reading")

    def __init__(self) -> None:
        super().__init__()
        self.mirror: dict[bytes, set[Tier]] = {}
        self.scheduler = SchedulerSide(MemoryIndex(), 16)
        self.held: list[ReadHandle | WriteHandle] = []
        self.being_written: set[bytes] = set()
        self.store = self.open()

    def open(self) -> KVStore:
        return open_store(records=HOST_RECORDS)

    def settle(self) -> None:
        """Nothing moves and every event has been heard."""
        for event in self.store.drain_events():
            self.hear(event)
        stats = self.store.stats()
        beside = {handle.record for handle in self.held if not handle.record.attached}  # type: ignore[union-attr]
        assert stats.detached_bytes == NBYTES * len(beside)
        if not self.held:
            assert stats.host_bytes == NBYTES * stats.host_records

    def hear(self, event: StoreEvent) -> None:
        tiers = self.mirror.setdefault(event.key, set())
        assert (event.tier in tiers) == (event.kind == "removed"), "a copy comes once and goes once"
        self.scheduler.apply([], [event])
        if event.kind == "added":
            tiers.add(event.tier)
        else:
            tiers.remove(event.tier)
        if not tiers:
            del self.mirror[event.key]
            self.check_loss(event.key)

    def check_loss(self, key: bytes) -> None:
        children = {child for child, parent in PARENTS.items() if parent == key}
        assert not children & self.mirror.keys(), "parent evicted before child"

    def tier(self, key: bytes) -> Tier | None:
        tiers = self.mirror.get(key, set())
        return next((tier for tier in Tier if tier in tiers), None)

    def acquire_as_expected(self, key: bytes) -> ReadHandle | None:
        self.settle()
        before = self.store.stats()
        handle = self.store.acquire(key)
        after = self.store.stats()
        if handle is None and after.no_room > before.no_room:
            assert self.tier(key) == self.store.contains(key) == Tier.DISK
            assert before.detached_bytes + NBYTES > before.detached_budget
        elif key in self.being_written:
            assert handle is None
        else:
            assert (handle is not None) == (self.tier(key) is not None)
        return handle

    @initialize(numbers=st.lists(NUMBERS, max_size=12, unique=True))
    def begin(self, numbers: list[int]) -> None:
        for number in numbers:
            save(self.store, key_of(number), parent_of(number))

    @rule(target=writing, number=NUMBERS)
    def reserve(self, number: int) -> WriteHandle | None:
        self.settle()
        key = key_of(number)
        handle = self.store.reserve(key, parent_of(number), 16)
        if self.tier(key) == Tier.HOST or key in self.being_written:
            assert handle is None
        if handle is not None:
            self.being_written.add(key)
            self.held.append(handle)
            handle.data[:] = payload_of(handle.key, 16)
        return handle

    @rule(handle=consumes(writing))
    def commit(self, handle: WriteHandle | None) -> None:
        if handle is not None:
            self.being_written.remove(handle.key)
            self.held.remove(handle)
            self.store.commit(handle)
            assert self.store.contains(handle.key) is not None

    @rule(handle=consumes(writing))
    def abort(self, handle: WriteHandle | None) -> None:
        if handle is not None:
            self.being_written.remove(handle.key)
            self.held.remove(handle)
            handle.data[:] = 0xFF
            self.store.abort(handle)

    @rule(target=reading, numbers=st.lists(NUMBERS, min_size=1, max_size=4, unique=True))
    def acquire(self, numbers: list[int]) -> MultipleResults[ReadHandle]:
        handles = []
        for number in numbers:
            handle = self.acquire_as_expected(key_of(number))
            if handle is not None:
                self.held.append(handle)
                assert is_intact(handle)
                handles.append(handle)
        return multiple(*handles)

    @rule(handle=consumes(reading))
    def release(self, handle: ReadHandle) -> None:
        self.held.remove(handle)
        assert is_intact(handle), "bytes changed while they were pinned"
        self.store.release(handle)

    @rule(number=NUMBERS)
    def read(self, number: int) -> None:
        handle = self.acquire_as_expected(key_of(number))
        if handle is not None:
            assert is_intact(handle)
            self.store.release(handle)

    @invariant()
    def budgets_and_counts_hold(self) -> None:
        stats = self.store.stats()
        assert stats.host_bytes <= stats.host_budget and stats.disk_bytes <= stats.disk_budget
        assert 0 <= stats.detached_bytes <= stats.detached_budget
        assert stats.reservations == len(self.being_written) == len(self.held) - stats.pins

    @rule()
    def index_is_right(self) -> None:
        self.settle()
        found = self.scheduler.index.lookup([[key] for key in PARENTS])
        for key, depth in zip(PARENTS, found, strict=True):
            assert self.store.contains(key) == self.tier(key)
            assert depth == (key in self.mirror)

    def teardown(self) -> None:
        self.store.close()


PARENTS = {key_of(number): parent_of(number) for number in range(CHUNKS * LENGTH)}


class DiskMachine(HostMachine):
    """The same with files below, which are also spoilt, with room beside the arena, and with restarts."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        super().__init__()

    def open(self) -> KVStore:
        beside, disk = DETACHED_RECORDS * NBYTES, DISK_RECORDS * FILE_NBYTES
        return open_store(self.path, records=HOST_RECORDS_WITH_DISK, detached_bytes=beside, disk_bytes=disk)

    def settle(self) -> None:
        assert self.store.flush(20)
        super().settle()

    def check_loss(self, key: bytes) -> None:
        """A chunk's end may lie in one tier and its beginning in the other: each minds its own order."""

    @rule(
        which=st.integers(0, 99),
        position=st.sampled_from(range(0, FILE_NBYTES, 41)),
        change=st.integers(1, 255),
    )
    def spoil(self, which: int, position: int, change: int) -> None:
        self.settle()
        files = [
            file for file in record_files(self.path) if bytes.fromhex(file.stem) not in self.being_written
        ]
        if not files:
            return
        file = files[which % len(files)]
        key = bytes.fromhex(file.stem)
        sound = file.read_bytes()
        data = bytearray(sound)
        data[position] ^= change
        file.write_bytes(data)
        in_host = self.tier(key) == Tier.HOST
        before = self.store.stats()
        assert load(self.store, key) == in_host
        self.settle()
        after = self.store.stats()
        if in_host or after.no_room > before.no_room:  # nobody looks at the file
            file.write_bytes(sound)
        else:
            assert key not in self.mirror and not file.exists()
            assert after.damaged == before.damaged + 1

    @precondition(lambda self: not self.held)
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
    max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
