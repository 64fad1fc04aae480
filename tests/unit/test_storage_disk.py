"""`KVStore` with a disk tier: demotion, promotion, restart, faults."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from daric_rag.engine.storage import disk as disk_module
from daric_rag.engine.storage import probe_record, record_path, stored_keys, write_behind
from daric_rag.engine.storage.directory import check_header, process_is_running, process_start_time
from daric_rag.engine.storage.disk import DiskRecord
from daric_rag.engine.storage.host import HostRecord
from daric_rag.engine.storage.loader import Load
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


def _eventually(condition: object, attempts: int = 400) -> bool:
    pause = threading.Event()
    for _ in range(attempts):
        if condition():  # type: ignore[operator]
            return True
        pause.wait(0.025)
    return False


def test_a_process_of_which_only_the_status_is_left_is_not_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    start = process_start_time(process.pid)
    assert process_is_running(process.pid, start)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its status stays to be read
    assert not process_is_running(process.pid, start)
    process.wait()
