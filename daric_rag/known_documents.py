"""Document texts seen anywhere in this process, for the engines that have to recognise them in prompts.

A chain's retriever and its language model do not know each other. What a retriever or a vector store of ours
returns, or a callback reports, is told to every attached engine; an engine that starts later gets what was seen
before, because in a chain the first retrieval comes before the first prompt.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class RegistersDocuments(Protocol):
    """What an engine has to offer to be told of documents (`DaricEngine.register`)."""

    def register(self, texts: Sequence[str]) -> None:
        """Let `texts` be recognised in prompts."""


class KnownDocuments:
    """Remembers document texts and passes them on to engines, which are held weakly; for any thread.

    `max_bytes`: texts kept for engines that are not attached yet; above it the oldest are dropped.
    """

    def __init__(self, max_bytes: int = 128 << 20) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, None] = OrderedDict()  # least recently seen first
        self._num_bytes = 0
        self._engines: weakref.WeakSet[RegistersDocuments] = weakref.WeakSet()

    def register(self, texts: Sequence[str]) -> None:
        """Make document texts known to all attached engines and to those attached later."""
        with self._lock:
            for text in texts:
                self._remember(text)
            engines = list(self._engines)
        for engine in engines:
            engine.register(texts)

    def attach(self, engine: RegistersDocuments) -> None:
        """Tell an engine what is known and, while it exists, what becomes known; again: does nothing."""
        with self._lock:
            if engine in self._engines:
                return
            self._engines.add(engine)
            texts = list(self._texts)
        engine.register(texts)

    def _remember(self, text: str) -> None:
        if text in self._texts:
            self._texts.move_to_end(text)
            return
        self._texts[text] = None
        self._num_bytes += sys.getsizeof(text)
        while self._num_bytes > self.max_bytes:
            oldest, _ = self._texts.popitem(last=False)
            self._num_bytes -= sys.getsizeof(oldest)


_KNOWN = KnownDocuments()


def register_documents(texts: Sequence[str]) -> None:
    """Let these texts be recognised as documents in the plain text prompts of every engine in this process."""
    _KNOWN.register(texts)


def attach_engine(engine: RegistersDocuments) -> None:
    """Let an engine recognise every document that is or becomes known in this process."""
    _KNOWN.attach(engine)
