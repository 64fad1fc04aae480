"""Whose budget it is, and who goes first: one folder for models, ranks and engines; uses that outlive them."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path

from daric_rag.config import DaricConfig
from daric_rag.engine.storage import record_path, stored_keys, write_behind
from daric_rag.engine.storage.directory import list_records
from daric_rag.engine.storage.opening import open_store as open_configured_store
from tests.storage_support import (
    ROOT,
    SPEC,
    key_of,
    load,
    open_store,
    record_files,
    save,
)

FILE_NBYTES = 4096 + SPEC.payload_nbytes(16)


OTHER_ROOT = b"O" * 32


def folder_nbytes(path: Path) -> int:
    total = 0
    for file in record_files(path):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


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


def test_budgets_are_those_of_a_whole_engine(tmp_path: Path) -> None:
    config = DaricConfig(host_bytes=1 << 20, disk_path=str(tmp_path), disk_bytes=1 << 20)
    options = {"model_id": "m", "rank": 1, "num_ranks": 4, "pin_memory": False}
    for longest_prompt, beside in ((16, 1 << 18), (8192, SPEC.payload_nbytes(8192))):
        store = open_configured_store(config, SPEC, ROOT, longest_prompt=longest_prompt, **options)
        stats = store.stats()
        assert (stats.host_budget, stats.disk_budget, stats.detached_budget) == (1 << 18, 1 << 18, beside)
        store.close()
