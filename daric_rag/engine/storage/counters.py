"""How often the records under one root were used, over all engines: a small JSON file for `daric-rag cache stats`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping

from daric_rag.engine.metrics import COUNTED, Counters
from daric_rag.engine.storage.directory import process_is_running, process_start_time, root_directory
from daric_rag.engine.storage.manifest import LOCK, write_json

COUNTERS = "counters.json"
_MAX_NBYTES = 1 << 20


def read_counters(path: str, root: bytes) -> Counters:
    """The counters of a root, without processes that are gone; zeros if there are none or they are damaged."""
    try:
        with open(os.path.join(root_directory(path, root), COUNTERS), "rb") as file:
            data = json.loads(file.read(_MAX_NBYTES))
        counts = {name: max(0, int(data["counts"].get(name, 0))) for name in COUNTED}
        host = {str(process): max(0, int(count)) for process, count in data["host_bytes"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Counters()
    return Counters(counts, {process: count for process, count in host.items() if _is_running(process)})


def report_counters(path: str, root: bytes, increase: Mapping[str, int], host_bytes: int | None) -> None:
    """Add to the counters of a root, and say what this process holds in host memory; None: it ends.

    A failure is not worth more than a missing number: nothing is raised.
    """
    directory = root_directory(path, root)
    with contextlib.suppress(OSError), open(os.path.join(directory, LOCK), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_counters(path, root)
        for name in COUNTED:
            known.counts[name] += increase.get(name, 0)
        known.host_bytes.pop(_this_process(), None)
        if host_bytes is not None:
            known.host_bytes[_this_process()] = host_bytes
        write_json(directory, COUNTERS, {"counts": known.counts, "host_bytes": known.host_bytes})


def _this_process() -> str:
    return f"{os.getpid()}-{process_start_time(os.getpid())}"


def _is_running(process: str) -> bool:
    pid, _, start = process.partition("-")
    return pid.isdigit() and start.isdigit() and process_is_running(int(pid), int(start))
