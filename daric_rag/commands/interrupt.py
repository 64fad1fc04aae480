"""Ctrl-C while vLLM starts: its processes must not stay."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

_PATIENCE_S = 2.0


@contextlib.contextmanager
def interruptible_start() -> Iterator[None]:
    """Let SIGINT end the child processes first: without them vLLM's start fails at once instead of going on."""

    def interrupted(number: int, frame: object) -> NoReturn:
        end_child_processes()
        raise KeyboardInterrupt

    # An ignored SIGINT stays ignored; handlers can be set in the main thread only.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_child_processes() -> None:
    """End the processes that this one started with `multiprocessing`; their own workers end with them."""
    processes = multiprocessing.active_children()
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(timeout=_PATIENCE_S)
        if process.is_alive():  # a process that loads a model may not listen
            process.kill()
            process.join(timeout=_PATIENCE_S)
