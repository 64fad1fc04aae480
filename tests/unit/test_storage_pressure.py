"""`KVStore` with more to hold than host memory has room for, or than the disk can take or give in time."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from daric_rag.engine.storage import disk as disk_module
from daric_rag.engine.storage import loader as loader_module
from daric_rag.engine.storage import record_path, stored_keys
from daric_rag.engine.storage.host import State
from daric_rag.engine.storage.loader import ReadRate
from tests.storage_support import (
    ROOT,
    SPEC,
    is_intact,
    key_of,
    load,
    open_store,
    payload_of,
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
