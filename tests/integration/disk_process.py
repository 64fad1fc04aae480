"""What other processes do to a disk tier: run as `python -m tests.integration.disk_process ACTION DIRECTORY …`.

Prints one JSON object. Children are forked from a process without threads, which costs milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from daric_rag.engine.storage import RecordSpec, probe_record, write_behind
from daric_rag.errors import CacheUnavailableError
from tests.storage_support import ROOT, key_of, load, open_store, record_files, save

SPEC = RecordSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="float32")
"""256 tokens take 1 MiB: a kill often lands in the middle of a write."""
NUM_TOKENS = 256
NOBODY = 65534


def main() -> None:
    action, path, *options = sys.argv[1:]
    print(json.dumps(ACTIONS[action](path, *options)))


def fork(work: Callable[[], object]) -> int:
    """A child that runs `work` and then ends with status 0, or 1 after an error."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask(work: Callable[[], object]) -> object:
    """What `work` returns, from a child that ran it."""
    reading, writing = os.pipe()
    pid = fork(lambda: os.write(writing, json.dumps(work()).encode()))
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"child ended with status {status}")
    return json.loads(answer)


def kill_while_writing(path: str, rounds: str, seed: str) -> dict[str, object]:
    """Kill a writer at random moments; after each kill look what a new process finds."""
    generator = random.Random(seed)
    results = []
    for number in range(int(rounds)):
        reading, writing = os.pipe()
        keys = range(20 * number, 20 * number + 20)
        pid = fork(lambda keys=keys, writing=writing: write_and_tell(path, keys, writing))  # type: ignore[misc]
        os.close(writing)
        time.sleep(generator.uniform(0.0, 0.15))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(reading, "rb") as pipe:
            told = list(pipe.read())
        temporaries = len(list(Path(path).rglob("*.tmp")))
        found = ask(lambda: read_all(path, range(20 * int(rounds))))
        results.append(
            {"told": [20 * number + index for index in told], "cut_short": temporaries, "found": found}
        )
    return {"rounds": results}


def write_and_tell(path: str, keys: range, pipe: int) -> None:
    store = open_store(path, spec=SPEC, host_bytes=64 << 20, disk_bytes=1 << 30)
    told = set()
    for number in keys:
        save(store, key_of(number), num_tokens=NUM_TOKENS)
    while len(told) < len(keys):
        for index, number in enumerate(keys):
            if index not in told and probe_record(path, ROOT, 0, key_of(number)):
                told.add(index)
                os.write(pipe, bytes([index]))


def read_all(path: str, keys: range) -> dict[str, object]:
    store = open_store(path, spec=SPEC, host_bytes=64 << 20, disk_bytes=1 << 30)
    store.flush(30)
    hits = [number for number in keys if load(store, key_of(number))]
    store.flush(30)
    result = {
        "hits": hits,
        "damaged": store.stats().damaged,
        "temporaries": len(list(Path(path).rglob("*.tmp"))),
        "files": len(record_files(Path(path))),
    }
    store.close()
    return result


def write_together(path: str, processes: str, count: str) -> dict[str, object]:
    """Several processes save and load the same segments at once, each with little memory of its own."""
    pids = [fork(lambda seed=seed: save_and_load(path, seed, int(count))) for seed in range(int(processes))]  # type: ignore[misc]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    return {"statuses": statuses, "found": ask(lambda: read_all(path, range(int(count))))}


def save_and_load(path: str, seed: int, count: int) -> None:
    store = open_store(path, spec=SPEC, host_bytes=8 << 20, disk_bytes=1 << 30)
    generator = random.Random(seed)
    for _ in range(4 * count):
        number = generator.randrange(count)
        if not load(store, key_of(number)):
            save(store, key_of(number), num_tokens=NUM_TOKENS)
    for number in range(count):
        if not load(store, key_of(number)):
            save(store, key_of(number), num_tokens=NUM_TOKENS)
        assert store.flush(60)
    stats = store.stats()
    assert (stats.pins, stats.reservations, stats.damaged, stats.write_errors) == (0, 0, 0, 0), stats
    store.close()


def fill_disk(path: str, how: str) -> dict[str, object]:
    """No room for a record, later room again; `how` is a limit of file size, or a ballast file on a small disk."""
    write_behind.FIRST_RETRY_S = write_behind.LAST_RETRY_S = 0.05
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("daric_rag").addHandler(handler)
    ballast = Path(path) / "ballast"
    store = open_store(path, spec=SPEC, host_bytes=8 << 20, disk_bytes=1 << 30)
    save(store, key_of(0), num_tokens=NUM_TOKENS)
    store.flush(30)
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, resource.RLIM_INFINITY))
    else:
        fill(ballast)
    served = all(
        save(store, key_of(number), num_tokens=NUM_TOKENS) and load(store, key_of(number))
        for number in range(1, 6)
    )
    while store.stats().write_errors < 3:  # the first attempt and two more
        time.sleep(0.02)
    full = store.stats()
    before = len(record_files(Path(path)))
    still_read = load(store, key_of(0))
    if how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        ballast.unlink()
    for _ in range(600):
        if not store.stats().read_only:
            break
        time.sleep(0.05)
    recovered = store.flush(30) and not store.stats().read_only
    store.close()
    return {
        "served": served,
        "read_only": full.read_only,
        "write_errors": full.write_errors,
        "still_read": still_read,
        "files_when_full": before,
        "warnings": messages,
        "recovered": recovered,
        "found": ask(lambda: read_all(path, range(6))),
    }


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def open_unwritable(path: str) -> dict[str, object]:
    """Open a store as a user who may read but not write."""
    os.chmod(path, 0o555)
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        open_store(path, spec=SPEC)
    except CacheUnavailableError as error:
        return {"error": str(error)}
    return {"error": ""}


ACTIONS: dict[str, Callable[..., dict[str, object]]] = {
    "kill": kill_while_writing,
    "together": write_together,
    "fill": fill_disk,
    "unwritable": open_unwritable,
}

if __name__ == "__main__":
    main()
