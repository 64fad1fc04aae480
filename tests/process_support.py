"""Children of a test; a forked one is asked one thing, and never waited for longer than a hang takes to show."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

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
    return [child for child in psutil.Process().children() if "EngineCore" in " ".join(child.cmdline())]
