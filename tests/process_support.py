"""Children of a test; a forked one is asked one thing, and never waited for longer than a hang takes to show."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence

import psutil

PATIENCE_S = 20.0


def in_fork(action: Callable[[], object]) -> str:
    """What `action` answers in a forked child: its result, or the error as "Type: message", or "hangs"."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            text = repr(action())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    try:
        answered, _, _ = select.select([reading], [], [], PATIENCE_S)
        return os.read(reading, 4000).decode() if answered else "hangs"
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def engine_processes() -> list[psutil.Process]:
    """The engine cores that this process has started and that run."""
    return [child for child in psutil.Process().children() if runs(child) and is_engine_core(child)]


def is_engine_core(process: psutil.Process) -> bool:
    try:
        return "EngineCore" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def runs(process: psutil.Process) -> bool:
    """Whether a process is more than an entry that nobody has read yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of `processes` that run after `seconds`, which are ended then; returns as soon as there are none."""
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        process.kill()
    return left
