"""`KVStore` with a disk tier: demotion, promotion, restart, budgets, faults."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from daric_rag.engine.storage import disk as disk_module
from daric_rag.engine.storage import loader as loader_module
from daric_rag.engine.storage import probe_record, record_path, stored_keys, write_behind
from daric_rag.engine.storage.directory import check_header, list_records
from daric_rag.engine.storage.disk import DiskRecord
from daric_rag.engine.storage.host import HostRecord, State
from daric_rag.engine.storage.loader import Load, ReadRate
from daric_rag.engine.storage.record import DamagedRecordError, namespace_digest
from daric_rag.errors import CacheUnavailableError
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

FILE_NBYTES = 4096 + SPEC.payload_nbytes(16)


@contextlib.contextmanager
def stalled_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A disk on which nothing is finished before the end of the block."""
    go = threading.Event()
    real = disk_module.write_record

    def write_record(*arguments: object) -> None:
        assert go.wait(60)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_module, "write_record", write_record)
    try:
        yield
    finally:
        go.set()


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, model_id="m")
    for number in range(6):
        save(store, key_of(number), key_of(number - 1) if number else ROOT)
    store.close()
    store = open_store(tmp_path)
    assert store.flush(10)
    events = {event.key: event for event in store.drain_events()}
    for number in range(6):
        event = events[key_of(number)]
        assert (event.kind, event.tier) == ("added", "disk")
        assert load(store, key_of(number))
    assert store.stats().disk_hits == 6
    store.close()


def test_evicted_records_go_to_disk_and_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=4)
    for number in range(12):
        assert save(store, key_of(number))
        assert store.flush(10)
    tiers = [store.contains(key_of(number)) for number in range(12)]
    assert tiers == ["disk"] * 8 + ["host"] * 4
    store.drain_events()
    handle = store.acquire(key_of(0))
    assert handle is not None and handle.tier == "disk" and is_intact(handle)
    store.release(handle)
    assert store.flush(10)
    assert store.contains(key_of(0)) == "host"
    moved = [(event.kind, event.key, event.tier) for event in store.drain_events()]
    assert moved == [("removed", key_of(8), "host"), ("added", key_of(0), "host")]
    stats = store.stats()
    assert (stats.promotions, stats.evictions, stats.disk_hits) == (1, 9, 1)
    store.close()


def test_what_waits_for_the_disk_is_not_lost_to_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stalled_writes(monkeypatch):
        store = open_store(tmp_path, records=4)
        assert all(save(store, key_of(number)) for number in range(8))
        stats = store.stats()
        assert stats.evictions == 0
        assert stats.detached_bytes == 4 * SPEC.payload_nbytes(16) <= stats.detached_budget
        assert all(load(store, key_of(number)) for number in range(8)), "from memory, wherever it is"
    assert store.flush(10)
    assert store.stats().detached_bytes == 0
    assert stored_keys(str(tmp_path), ROOT, 1) == {key_of(number) for number in range(8)}
    assert all(load(store, key_of(number)) for number in range(8))
    store.close()


def test_host_memory_goes_on_while_the_disk_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stalled_writes(monkeypatch):
        store = open_store(tmp_path, records=4, detached_bytes=2 * SPEC.payload_nbytes(16))
        for number in range(40):
            assert save(store, key_of(number)), "as without a disk, the newest stays"
            assert load(store, key_of(number))
            stats = store.stats()
            assert stats.host_bytes <= stats.host_budget and stats.detached_bytes <= stats.detached_budget
    assert store.flush(10)
    store.close()


def test_documents_of_one_prompt_larger_than_host_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=3, detached_bytes=10 * SPEC.payload_nbytes(16))
    writing = [store.reserve(key_of(number), b"", 16) for number in range(12)]
    for handle in writing:
        assert handle is not None
        handle.data[:] = payload_of(handle.key, 16)
        store.commit(handle)
    assert store.reserve(key_of(0), b"", 16) is None
    assert store.flush(10)
    for _ in range(3):
        handles = [store.acquire(key_of(number)) for number in range(12)]
        assert all(handle is not None and is_intact(handle) for handle in handles)
        for handle in handles:
            store.release(handle)  # type: ignore[arg-type]
        assert store.flush(10)
        stats = store.stats()
        assert (stats.pins, stats.detached_bytes, stats.no_room, stats.misses) == (0, 0, 0, 0)
    store.close()


def test_reads_keep_to_the_budget_beside_the_arena(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=2, detached_bytes=3 * SPEC.payload_nbytes(16))
    for number in range(8):
        save(store, key_of(number))
        assert store.flush(10)
    handles = [store.acquire(key_of(number)) for number in range(8)]
    assert [handle is not None for handle in handles] == [True] * 5 + [False] * 3
    stats = store.stats()
    assert (stats.no_room, stats.misses, stats.detached_bytes) == (3, 0, stats.detached_budget)
    assert store.contains(key_of(7)) == "disk", "no room is not missing"
    assert all(handle is None or is_intact(handle) for handle in handles)
    handles.clear()
    assert load(store, key_of(7))
    assert store.flush(10) and store.stats().detached_bytes == 0
    store.close()


def test_a_late_read_is_a_miss_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    store.close()
    go = threading.Event()
    real = loader_module.read_layers

    def read_layers(*arguments: object) -> None:
        assert go.wait(60)
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(loader_module, "read_layers", read_layers)
    store = open_store(tmp_path)
    handle = store.acquire(key_of(1))
    assert handle is not None
    deadline = time.monotonic() + 0.05
    assert not any(handle.wait(layer, deadline) for layer in range(3))
    store.release(handle)
    assert store.reserve(key_of(1), b"", 16) is None, "it is on its way"
    assert [event.kind for event in store.drain_events()] == ["added"]
    go.set()
    assert store.flush(10) and load(store, key_of(1))
    assert (store.stats().damaged, store.stats().promotions) == (0, 1)
    store.close()


def test_close_does_not_wait_for_a_disk_that_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    for number in range(9):
        save(store, key_of(number))
    store.close()
    go = threading.Event()
    monkeypatch.setattr(loader_module, "read_layers", lambda *arguments: go.wait(60))
    store = open_store(tmp_path)
    handles = [handle for number in range(9) if (handle := store.acquire(key_of(number)))]
    started = time.monotonic()
    store.close(timeout=0.2)
    assert time.monotonic() - started < 10
    assert not any(handle.wait(0, time.monotonic()) for handle in handles)
    go.set()


def test_read_rate_falls_while_a_disk_stalls_and_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(monotonic=lambda: now))
    rate = ReadRate()
    assert rate.value() is None
    for _ in range(5):
        rate.started()
        now += 0.1
        rate.read(10_000_000)
        rate.ended()
        now += 7.0  # nothing is read: no matter
    assert rate.value() == pytest.approx(1e8, rel=0.1)
    rate.started()
    now += 10.0
    assert rate.value() < 1e5  # type: ignore[operator]
    rate.ended()
    now += 61.0
    assert rate.value() is None
    monkeypatch.undo()


def test_disk_reads_are_measured_and_foretold(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    assert store.flush(10)
    assert store.disk_nbytes_of([key_of(1), key_of(2)]) == 0 and store.read_bytes_per_s() is None
    store.close()
    store = open_store(tmp_path)
    assert store.flush(10)
    assert store.disk_nbytes_of([key_of(1), key_of(2)]) == FILE_NBYTES
    assert load(store, key_of(1)) and store.flush(10)
    assert store.read_bytes_per_s() > 0  # type: ignore[operator]
    assert store.disk_nbytes_of([key_of(1), key_of(2)]) == 0
    store.close()


def test_lru_of_the_disk_outlives_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=12)
    for number in range(10):
        save(store, key_of(number))
    store.close()
    for age, number in enumerate((3, 7)):  # used long ago, the others later
        os.utime(record_path(str(tmp_path), ROOT, 0, key_of(number)), (1000 + age, 1000 + age))
    store = open_store(tmp_path, disk_bytes=8 * FILE_NBYTES)
    assert store.flush(10)
    present = stored_keys(str(tmp_path), ROOT, 1)
    assert present == {key_of(number) for number in range(10)} - {key_of(3), key_of(7)}
    store.close()


def test_disk_budget_holds(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=4, disk_bytes=5 * FILE_NBYTES)
    for number in range(20):
        save(store, key_of(number))
        assert store.flush(10)
        assert sum(file.stat().st_size for file in record_files(tmp_path)) <= 5 * FILE_NBYTES
    stats = store.stats()
    assert stats.disk_evictions == 15 and stats.disk_records == 5
    copies: set[tuple[bytes, str]] = set()
    for event in store.drain_events():
        (copies.add if event.kind == "added" else copies.remove)((event.key, event.tier))
    assert {key for key, _ in copies} == {
        key_of(number) for number in range(20) if store.contains(key_of(number))
    }
    store.close()


def test_record_larger_than_the_disk_budget_stays_in_memory(tmp_path: Path) -> None:
    store = open_store(tmp_path, disk_bytes=100)
    save(store, key_of(1))
    assert store.flush(10)
    assert record_files(tmp_path) == [] and load(store, key_of(1))
    store.close()


def test_what_another_engine_writes_and_deletes_is_noticed(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path)
    assert first.flush(10) and second.flush(10)
    save(first, key_of(1), ROOT)
    assert first.flush(10)
    assert second.contains(key_of(1)) == "disk"
    assert load(second, key_of(1))
    assert ("added", "disk") in [(event.kind, event.tier) for event in second.drain_events()]
    save(second, key_of(1))
    save(first, key_of(2))
    assert first.flush(10)
    for file in record_files(tmp_path):
        file.unlink()
    assert load(second, key_of(1)), "it is in host memory"
    assert not load(second, key_of(2))
    first.close()
    second.close()


def test_refresh_finds_what_others_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "REFRESH_INTERVAL_S", 0.0)
    first, second = open_store(tmp_path), open_store(tmp_path)
    for number in range(4):
        save(first, key_of(number))
    assert first.flush(10)
    Path(record_path(str(tmp_path), ROOT, 0, key_of(0))).unlink()
    assert second.flush(10)
    save(second, key_of(9))  # a write is followed by a look at the directory
    assert second.flush(10)
    assert {event.key for event in second.drain_events()} >= {key_of(number) for number in (1, 2, 3, 9)}
    assert second.stats().disk_records == 4
    first.close()
    second.close()


@pytest.mark.parametrize("harm", ["truncate", "empty", "delete", "directory", "link", "pipe"])
def test_file_spoilt_while_serving_is_a_miss(tmp_path: Path, harm: str) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    store.close()
    store = open_store(tmp_path)
    assert store.flush(10)
    (file,) = record_files(tmp_path)
    if harm == "truncate":
        os.truncate(file, FILE_NBYTES - 1)
    elif harm == "empty":
        os.truncate(file, 0)
    else:
        moved = file.rename(tmp_path / "moved")
        if harm == "directory":
            file.mkdir()
        elif harm == "link":
            file.symlink_to(moved)
        elif harm == "pipe":
            os.mkfifo(file)
    assert not load(store, key_of(1))
    assert store.flush(10) and store.stats().pins == 0
    assert not load(store, key_of(1))
    assert [event.kind for event in store.drain_events()] == ["added", "removed"]
    store.close()


@pytest.mark.parametrize("harm", ["truncate", "overwrite", "delete", "replace"])
def test_file_changed_between_two_layers(tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("daric_rag.engine.storage.loader.STEP_NBYTES", 1)
    store = open_store(tmp_path)
    save(store, key_of(1))
    store.close()
    (file,) = record_files(tmp_path)
    header = check_header(str(file), ROOT, key_of(1))
    record = HostRecord(key_of(1), b"", 16, header.namespace, 0, np.empty(SPEC.payload_nbytes(16), np.uint8))
    on_disk = DiskRecord(key_of(1), b"", 16, header.namespace, FILE_NBYTES, 0.0, 0.0)
    reading = Load(record, str(file), header, on_disk)
    reading.step()
    assert reading.wait(0, None)
    if harm == "truncate":
        os.truncate(file, 4096 + SPEC.layer_nbytes(16) + 5)
    elif harm == "overwrite":
        with file.open("r+b") as stream:
            stream.seek(4096 + SPEC.layer_nbytes(16))
            stream.write(bytes(SPEC.layer_nbytes(16)))
    elif harm == "delete":
        file.unlink()
    else:
        other = file.with_name("other")
        other.write_bytes(bytes(FILE_NBYTES))
        other.replace(file)
    if harm in ("truncate", "overwrite"):
        with pytest.raises(DamagedRecordError):
            reading.step()
        reading.end(failed=True)
        assert reading.wait(0, None) and not reading.wait(1, None) and not reading.wait(2, None)
    else:  # the open file is still the one that was verified
        reading.step()
        reading.step()
        assert reading.is_complete
        reading.end(failed=False)
        assert np.array_equal(record.data, payload_of(key_of(1), 16))


def test_no_room_in_host_memory_reads_beside_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=2)
    for number in range(4):
        save(store, key_of(number))
        assert store.flush(10)
    handles = [store.acquire(key_of(number)) for number in range(4)]
    assert all(handle is not None and is_intact(handle) for handle in handles)
    for handle in handles:
        store.release(handle)  # type: ignore[arg-type]
    assert store.flush(10)
    stats = store.stats()
    assert stats.pins == 0 and stats.host_bytes <= stats.host_budget
    store.close()


def test_store_and_load_at_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=6, disk_bytes=30 * FILE_NBYTES)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for _ in range(150):
                number = generator.randrange(40)
                if generator.random() < 0.02:
                    Path(record_path(str(tmp_path), ROOT, 0, key_of(number))).unlink(missing_ok=True)
                elif not load(store, key_of(number)):
                    save(store, key_of(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.flush(20)
    stats = store.stats()
    assert (stats.pins, stats.reservations, stats.damaged) == (0, 0, 0)
    assert stats.host_bytes <= stats.host_budget and stats.disk_bytes <= stats.disk_budget
    store.close()


def test_full_disk_makes_it_read_only_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(write_behind, "FIRST_RETRY_S", 0.05)
    full = threading.Event()
    real = disk_module.write_record

    def write_record(*arguments: object) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(disk_module, "write_record", write_record)
    store = open_store(tmp_path, records=4)
    save(store, key_of(0))
    assert store.flush(10)
    full.set()
    with caplog.at_level(logging.WARNING):
        for number in range(1, 10):
            assert save(store, key_of(number))
            store.flush(0.05)
    assert store.stats().read_only and store.stats().write_errors > 0
    assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]
    assert load(store, key_of(0)), "reading goes on"
    full.clear()
    monkeypatch.setattr(write_behind, "LAST_RETRY_S", 0.05)
    assert _eventually(lambda: not store.stats().read_only)
    assert store.flush(10)
    held = [key_of(number) for number in range(10) if store.contains(key_of(number)) == "host"]
    assert held and all(probe_record(str(tmp_path), ROOT, 0, key) == 16 for key in held)
    store.close()


def test_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheUnavailableError, match="file/below"):
        open_store(tmp_path / "file" / "below")


def test_orphans_go_and_temporaries_of_the_living_stay(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    temporaries = tmp_path / ROOT.hex() / "0" / "tmp"
    start = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    names = {
        f"{os.getpid()}-{start}-1-1.tmp": True,
        f"{os.getpid()}-1-1-1.tmp": False,  # the same number, another process
        "4194305-77-1-1.tmp": False,
        "notes.txt": True,
    }
    for name in names:
        (temporaries / name).write_bytes(b"half a record")
    open_store(tmp_path).close()
    assert {name: (temporaries / name).exists() for name in names} == names


def test_probe_believes_the_header_not_the_name(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    store.close()
    data = record_files(tmp_path)[0].read_bytes()
    assert probe_record(str(tmp_path), ROOT, 0, key_of(1)) == 16
    for root, key in ((b"O" * 32, key_of(1)), (ROOT, key_of(2))):
        file = Path(record_path(str(tmp_path), root, 0, key))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        assert probe_record(str(tmp_path), root, 0, key) is None


def test_ranks_roots_and_namespaces_stay_apart(tmp_path: Path) -> None:
    for rank, root in ((0, ROOT), (1, ROOT), (0, b"O" * 32)):
        store = open_store(tmp_path, rank=rank, root=root, namespace="tenant")
        save(store, key_of(10 * rank + root[0]))
        store.close()
    assert stored_keys(str(tmp_path), ROOT, 1) == {key_of(ROOT[0])}
    assert stored_keys(str(tmp_path), ROOT, 2) == set()
    (file,) = record_files(tmp_path / ROOT.hex() / "0")
    assert check_header(str(file), ROOT, key_of(ROOT[0])).namespace == namespace_digest("tenant")
    store = open_store(tmp_path)
    assert store.flush(10) and not load(store, key_of(10 + ROOT[0]))
    store.close()


def test_closing_writes_what_is_left_and_fails_no_reader(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=40)
    for number in range(30):
        save(store, key_of(number))
    store.close()
    assert len(stored_keys(str(tmp_path), ROOT, 1)) == 30
    store = open_store(tmp_path, records=40)
    handles = [handle for number in range(30) if (handle := store.acquire(key_of(number)))]
    store.close()
    for handle in handles:
        is_intact(handle)  # right or a miss, but it returns
        store.release(handle)
    assert store.stats().pins == 0


def test_reader_joins_a_load_under_way(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    store.close()
    store = open_store(tmp_path)
    handles = [store.acquire(key_of(1)) for _ in range(3)]
    assert all(handle is not None and is_intact(handle) for handle in handles)
    assert store.flush(10) and store.stats().promotions == 1
    record = store._host.get(key_of(1))
    assert record is not None and record.state is State.READY and record.pins == 3
    for handle in handles:
        store.release(handle)  # type: ignore[arg-type]
    assert record.pins == 0
    store.close()


def _eventually(condition: object, attempts: int = 400) -> bool:
    pause = threading.Event()
    for _ in range(attempts):
        if condition():  # type: ignore[operator]
            return True
        pause.wait(0.025)
    return False


OTHER_ROOT = b"O" * 32


def folder_nbytes(path: Path) -> int:
    total = 0
    for file in record_files(path):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def test_one_budget_for_all_models_of_a_folder(tmp_path: Path) -> None:
    budget = 6 * FILE_NBYTES
    store = open_store(tmp_path, disk_bytes=budget)
    for number in range(6):
        save(store, key_of(number))
    store.close()
    for age, number in enumerate((2, 4, 0, 1, 3, 5)):
        at = 1000 + 60 * age
        os.utime(record_path(str(tmp_path), ROOT, 0, key_of(number)), (at, at))
    other = open_store(tmp_path, disk_bytes=budget, root=OTHER_ROOT)
    for number in range(2):
        save(other, key_of(number))
        assert other.flush(10)
        assert folder_nbytes(tmp_path) <= budget
    assert stored_keys(str(tmp_path), ROOT, 1) == {key_of(number) for number in (0, 1, 3, 5)}, "oldest first"
    assert (other.stats().disk_other_bytes, other.stats().disk_bytes) == (4 * FILE_NBYTES, 2 * FILE_NBYTES)
    other.close()
    open_store(
        tmp_path, disk_bytes=3 * FILE_NBYTES, root=b"3" * 32
    ).close()  # it need not write to keep to its limit
    assert stored_keys(str(tmp_path), ROOT, 1) == {key_of(5)}
    assert len(stored_keys(str(tmp_path), OTHER_ROOT, 1)) == 2


def test_ranks_share_the_budget_of_the_folder(tmp_path: Path) -> None:
    budget = 8 * FILE_NBYTES
    stores = [open_store(tmp_path, disk_bytes=budget, rank=rank, num_ranks=2) for rank in range(2)]
    for number in range(12):
        for store in stores:
            save(store, key_of(number))
            assert store.flush(10)
        assert folder_nbytes(tmp_path) <= budget
    assert stored_keys(str(tmp_path), ROOT, 2) == {key_of(number) for number in range(8, 12)}, "of one mind"
    for store in stores:
        store.close()


def test_engines_that_fill_a_folder_together(tmp_path: Path) -> None:
    budget = 40 * FILE_NBYTES
    roots = [bytes([65 + number]) * 32 for number in range(3)]
    errors: list[BaseException] = []

    def work(root: bytes) -> None:
        store = open_store(tmp_path, records=6, disk_bytes=budget, root=root)
        generator = random.Random(root)
        try:
            for _ in range(120):
                number = generator.randrange(60)
                if not load(store, key_of(number)):
                    save(store, key_of(number))
                assert store.flush(20)
                # What the two others wrote since the last look is not known yet.
                assert (
                    folder_nbytes(tmp_path) <= budget * (1 + 2 / write_behind.REFRESH_SHARE) + 3 * FILE_NBYTES
                )
            assert (store.stats().damaged, store.stats().pins) == (0, 0)
        except BaseException as error:
            errors.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=work, args=(root,)) for root in roots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(stored_keys(str(tmp_path), root, 1) for root in roots), "nobody was driven out"


def test_frequency_of_use_outlives_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path, records=3)
    for number in range(10):
        save(store, key_of(number))
        assert store.flush(10)
    for _ in range(8):
        assert load(store, key_of(0))  # from disk, then from memory
    for number in range(1, 10):
        assert load(store, key_of(number)) and store.flush(10)
    store.close()
    store = open_store(tmp_path, disk_bytes=4 * FILE_NBYTES)
    assert store.flush(10)
    assert store.contains(key_of(0)) == "disk", "used often, though before all others"
    assert len(record_files(tmp_path)) == 4
    store.close()
    names = {file.stem: file for file in record_files(tmp_path)}
    for file in names.values():  # what is no stamp is the time of writing, and counts as one use
        os.utime(file, ns=(5_123_456_789, 5_123_456_789))
    assert {found.accesses for found in list_records(str(tmp_path), ROOT, 0)} == {1}


def test_uses_from_host_memory_keep_the_file_young(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(3):
        save(store, key_of(number))
    assert store.flush(10)
    for file in record_files(tmp_path):
        os.utime(file, (1000, 1000))
    for _ in range(3):
        assert load(store, key_of(1))
    store.close()
    times = {found.key: (found.last_access, found.accesses) for found in list_records(str(tmp_path), ROOT, 0)}
    assert times[key_of(0)] == times[key_of(2)] == (1000, 1)
    assert times[key_of(1)][0] > 1e9 and times[key_of(1)][1] == 4
