"""The end of an engine's process when the process that started it is gone.

A parent that is killed cannot end its children, and vLLM's own would go on for ever with a model in memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

_NAME = "daric-death-watch"
_POLL_S = 0.5
# For the step under way and for the store to write what it holds in memory.
_GRACE_S = 3.0


def watch_parent() -> None:
    """End this process within `_POLL_S` + `_GRACE_S` seconds of its parent's death; again: does nothing.

    Does nothing in a process that `multiprocessing` did not start: that one is not ours to end.
    """
    parent = multiprocessing.parent_process()
    if parent is None or any(thread.name == _NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent, os.getppid()), name=_NAME, daemon=True).start()


def _watch(parent: Any, parent_id: int) -> None:
    # Two signs, neither of which another process that got the parent's number can give. The sentinel is a pipe
    # that the parent holds: it tells of a death before this watch began, but not while a fork of the parent
    # holds it too. The kernel gives an orphan another parent, but to a fork server's child it is the server.
    while parent.is_alive() and os.getppid() == parent_id:
        parent.join(_POLL_S)
    _end_this_process()


def _end_this_process() -> None:
    """As vLLM ends it, which closes the store; by force if that takes too long."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    for child in multiprocessing.active_children():
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)
