"""One engine for all language model objects of a process that ask for the same model and options.

Frameworks construct their model objects again and again (copies, re-configuration, one per request), and an
engine takes long to start and a lot of memory. So the objects hold no engine of their own: engines start at the
first call and stay until `close_engines` or the end of the interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any

from daric_rag.config import DaricConfig
from daric_rag.known_documents import attach_engine

if TYPE_CHECKING:
    from daric_rag.engine.engine import DaricEngine


class _Slot:
    """The place of one engine; its lock is held while the engine starts, so that it starts once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: DaricEngine | None = None


# By process and arguments: an engine of the parent is of no use after a fork, and not ours to close.
_slots: dict[tuple[int, str], _Slot] = {}
_slots_lock = threading.Lock()


def get_engine(model: str, config: DaricConfig | None, engine_args: dict[str, Any]) -> DaricEngine:
    """The process's engine for these arguments, started if there is none yet or the last one was closed.

    Thread-safe; engines for other arguments start meanwhile. The engine recognises the documents that are known
    in this process. Raises what `DaricEngine` raises, and tries again at the next call.
    """
    with _slots_lock:
        slot = _slots.setdefault((os.getpid(), _key(model, config, engine_args)), _Slot())
    with slot.lock:
        if slot.engine is None or slot.engine.closed:
            from daric_rag.engine.engine import DaricEngine

            slot.engine = DaricEngine(model, config, **engine_args)
            attach_engine(slot.engine)
        return slot.engine


def close_engines() -> None:
    """Close the engines that `get_engine` started; the next call of a language model starts a new one."""
    with _slots_lock:
        slots = [_slots.pop(key) for key in list(_slots) if key[0] == os.getpid()]
    for slot in slots:
        with slot.lock:
            if slot.engine is not None:
                with contextlib.suppress(Exception):
                    slot.engine.close()


def _key(model: str, config: DaricConfig | None, engine_args: dict[str, Any]) -> str:
    """Equal for arguments that make equal engines."""
    settings = (config or DaricConfig()).model_dump()
    return json.dumps([model, settings, engine_args], sort_keys=True, default=repr)
