"""`KVStore` without a disk: reserving, pinning, aborting, evicting."""

from __future__ import annotations

import gc
import random
import threading

import pytest

from daric_rag.engine.storage import KVStore, ReadHandle, RecordSpec
from daric_rag.errors import EngineClosedError
from tests.storage_support import ROOT, SPEC, is_intact, key_of, load, open_store, payload_of, save


def test_record_comes_back_as_it_was() -> None:
    store = open_store()
    assert save(store, key_of(1))
    handle = store.acquire(key_of(1))
    assert handle is not None and is_intact(handle)
    assert (handle.tier, handle.num_tokens, handle.address) == ("host", 16, handle.data.ctypes.data)
    store.release(handle)
    store.release(handle)
    assert store.stats().pins == 0


def test_a_record_is_invisible_until_it_is_committed() -> None:
    store = open_store()
    handle = store.reserve(key_of(1), b"", 16)
    assert handle is not None
    assert store.acquire(key_of(1)) is None and store.contains(key_of(1)) is None
    assert store.reserve(key_of(1), b"", 16) is None
    assert store.drain_events() == []
    handle.data[:] = payload_of(key_of(1), 16)
    store.commit(handle)
    assert store.contains(key_of(1)) == "host"
    assert [(event.kind, event.key, event.tier) for event in store.drain_events()] == [
        ("added", key_of(1), "host")
    ]
    assert store.reserve(key_of(1), b"", 16) is None


def test_budget_holds_and_what_is_evicted_is_said() -> None:
    store = open_store(records=4)
    for number in range(10):
        assert save(store, key_of(number))
        assert store.stats().host_bytes <= store.stats().host_budget
    removed = [event.key for event in store.drain_events() if event.kind == "removed"]
    assert removed == [key_of(number) for number in range(6)]
    assert [load(store, key_of(number)) for number in range(10)] == [False] * 6 + [True] * 4
    stats = store.stats()
    assert (stats.evictions, stats.host_hits, stats.misses, stats.host_records) == (6, 4, 6, 4)


def test_pinned_and_half_written_records_are_never_evicted() -> None:
    store = open_store(records=4)
    for number in range(2):
        save(store, key_of(number))
    pinned = [store.acquire(key_of(number)) for number in range(2)]
    writing = [store.reserve(key_of(number), b"", 16) for number in (2, 3)]
    assert not save(store, key_of(4))
    assert all(handle is not None and is_intact(handle) for handle in pinned)
    assert all(handle is not None for handle in writing)
    store.release(pinned[0])  # type: ignore[arg-type]
    assert save(store, key_of(4))
    assert store.contains(key_of(0)) is None and store.contains(key_of(1)) == "host"


def test_too_large_for_the_arena_evicts_nothing() -> None:
    store = open_store(records=2)
    save(store, key_of(1))
    assert store.reserve(key_of(2), b"", 256) is None
    assert load(store, key_of(1))


def test_aborted_and_forgotten_reservations_give_their_space_back() -> None:
    store = open_store(records=2)
    handles = [store.reserve(key_of(number), b"", 16) for number in range(2)]
    assert store.stats().reservations == 2
    store.abort(handles[0])  # type: ignore[arg-type]
    store.abort(handles[0])  # type: ignore[arg-type]
    handles.clear()
    gc.collect()
    assert store.stats().reservations == 0 and store.stats().host_bytes == 0
    assert save(store, key_of(0)) and save(store, key_of(1))


def test_forgotten_reading_handles_are_unpinned() -> None:
    store = open_store(records=1)
    save(store, key_of(1))
    handle = store.acquire(key_of(1))
    assert not save(store, key_of(2))
    del handle
    gc.collect()
    assert store.stats().pins == 0
    assert save(store, key_of(2))


def test_record_aborted_while_its_key_is_written_again() -> None:
    store = open_store(records=4)
    first = store.reserve(key_of(1), b"", 16)
    assert first is not None
    store.abort(first)
    assert save(store, key_of(1))
    store.abort(first)
    assert load(store, key_of(1))


def test_a_thousand_requests_with_aborts_leave_nothing_behind() -> None:
    store = open_store(records=12)
    generator = random.Random(7)
    held: list[ReadHandle] = []
    for request in range(1000):
        chunk = generator.randrange(40) * 10
        parent = b""
        for number in range(chunk, chunk + 3):
            handle = store.acquire(key_of(number))
            if handle is not None:
                assert is_intact(handle)
                held.append(handle)
            elif (writing := store.reserve(key_of(number), parent, 16)) is not None:
                writing.data[:] = payload_of(key_of(number), 16)
                (store.abort if request % 5 == 0 else store.commit)(writing)
            parent = key_of(number)
        for handle in held:
            store.release(handle)
        held.clear()
    stats = store.stats()
    assert (stats.pins, stats.reservations) == (0, 0)
    assert stats.host_hits > 0 and stats.evictions > 0
    assert stats.host_bytes == stats.host_records * SPEC.payload_nbytes(16) <= stats.host_budget


def test_sizes_of_all_kinds_share_the_arena() -> None:
    store = open_store(records=20)
    generator = random.Random(3)
    sizes = {number: generator.randint(1, 60) for number in range(60)}
    for _ in range(600):
        number = generator.randrange(60)
        if not load(store, key_of(number)):
            assert save(store, key_of(number), num_tokens=sizes[number])
    assert store.stats().host_bytes > 0.7 * store.stats().host_budget


def test_many_threads() -> None:
    store = open_store(records=10)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for _ in range(300):
                number = generator.randrange(20)
                if not load(store, key_of(number)):
                    save(store, key_of(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.stats().pins == store.stats().reservations == 0


def test_closed_store_says_so_and_handles_stay_readable() -> None:
    store = open_store()
    save(store, key_of(1))
    handle = store.acquire(key_of(1))
    store.close()
    store.close()
    assert handle is not None and is_intact(handle)
    store.release(handle)
    for call in (lambda: store.acquire(key_of(1)), lambda: store.reserve(key_of(2), b"", 16)):
        with pytest.raises(EngineClosedError):
            call()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"host_bytes": 0}, "host_bytes"),
        ({"disk_path": "somewhere"}, "disk_bytes"),
        ({"rank": -1}, "rank"),
        ({"root": b"short"}, "root"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        KVStore(SPEC, **({"host_bytes": 1000, "root": ROOT} | options))  # type: ignore[arg-type]


def test_bad_segments_are_named() -> None:
    store = open_store()
    for key, parent, num_tokens, name in (
        (b"x", b"", 16, "key"),
        (key_of(1), b"x", 16, "parent"),
        (key_of(1), b"", 0, "num_tokens"),
        (key_of(1), b"", 257, "num_tokens"),
    ):
        with pytest.raises(ValueError, match=name):
            store.reserve(key, parent, num_tokens)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((0, 1, 1, "float32"), "num_layers"),
        ((1, 70000, 1, "float32"), "num_kv_heads"),
        ((1, 1, 1, "int8"), "dtype"),
    ],
)
def test_bad_specs_are_named(fields: tuple[int, int, int, str], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        RecordSpec(*fields)


def test_spec_sizes() -> None:
    spec = RecordSpec(30, 3, 64, "bfloat16")
    assert spec.bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert spec.payload_nbytes(256) == 30 * spec.layer_nbytes(256) == 256 * spec.bytes_per_token
