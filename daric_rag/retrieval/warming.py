"""Warming documents' KV in the background while they are indexed."""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from types import TracebackType
from typing import Any, Protocol, Self

from daric_rag.errors import EngineClosedError
from daric_rag.one_process import OneProcess
from daric_rag.retrieval.document_store import DocumentStore
from daric_rag.retrieval.hooks import both

logger = logging.getLogger(__name__)

WARM_BATCH = 16  # documents in one call of the engine


class WarmingEngine(Protocol):
    """The part of the engine that is needed here."""

    def warm(self, documents: Sequence[str], *, progress: bool | None = None) -> Any:
        """Compute and store the independent KV of documents."""


class BackgroundWarmer(OneProcess):
    """One daemon thread that calls `engine.warm` with the texts given to `submit`, a few at a time.

    At most `max_pending` texts wait; further ones are dropped and counted in `dropped`, because a document
    that is not warm is only slower the first time it is used. Errors of the engine are logged once and
    counted in `failed`; they never reach the caller of `submit`.
    """

    kind = "background warmer"

    def __init__(self, engine: WarmingEngine, *, max_pending: int = 10_000) -> None:
        self.check_process()
        if max_pending < 1:
            raise ValueError(f"max_pending={max_pending!r}: must be at least 1")
        self.warmed = 0
        self.failed = 0
        self.dropped = 0
        self._engine = engine
        self._max_pending = max_pending
        self._backlog: Iterator[str] | None = None
        self._pending: deque[str] = deque()
        self._working = True  # until the thread has found nothing to do
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="daric-warm", daemon=True)
        self._thread.start()

    def submit(self, texts: Sequence[str]) -> None:
        """Queue texts and return at once."""
        self.check_process()
        with self._changed:
            room = 0 if self._closed else self._max_pending - len(self._pending)
            self._pending.extend(texts[:room])
            if len(texts) > room and not self._closed:
                if not self.dropped:
                    logger.warning("%d documents wait to be warmed; further ones are not", self._max_pending)
                self.dropped += len(texts) - room
            self._changed.notify_all()

    def feed(self, texts: Iterable[str]) -> None:
        """Warm any number of texts, read from `texts` as the engine gets to them."""
        self.check_process()
        with self._changed:
            if not self._closed:
                self._backlog = chain(self._backlog or (), texts)
                self._working = True
                self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything submitted was warmed; False if `timeout` seconds passed before."""
        self.check_process()
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drop what still waits and end the thread after the batch it is at; may be called again.

        In a forked process it does nothing: the thread is its parent's.
        """
        if self.is_elsewhere:
            return
        with self._changed:
            self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _has_work(self) -> bool:
        return self._closed or bool(self._pending) or self._backlog is not None

    def _is_idle(self) -> bool:
        return self._closed or not (self._pending or self._working)

    def _stop(self) -> None:
        self._closed = True
        self._pending.clear()
        self._backlog = None
        self._changed.notify_all()

    def _run(self) -> None:
        while batch := self._next_batch():
            self._warm(batch)

    def _next_batch(self) -> list[str]:
        """The next texts, new ones before the backlog; waits for some, and is empty when closed."""
        while True:
            with self._changed:
                if not self._pending and self._backlog is None:
                    self._working = False
                    self._changed.notify_all()
                    self._changed.wait_for(self._has_work)
                if self._closed:
                    return []
                self._working = True
                batch = [self._pending.popleft() for _ in range(min(WARM_BATCH, len(self._pending)))]
                backlog = self._backlog
            if not batch and backlog is not None:
                batch = self._from_backlog(backlog)
            if batch:
                return batch

    def _from_backlog(self, backlog: Iterator[str]) -> list[str]:
        # Without the lock: reading the store must not hold up those who submit.
        try:
            batch = list(islice(backlog, WARM_BATCH))
        except Exception as error:
            self._log_failure(error, 0)
            batch = []
        if not batch:
            with self._changed:
                if self._backlog is backlog:  # not fed with more meanwhile
                    self._backlog = None
        return batch

    def _warm(self, batch: list[str]) -> None:
        try:
            self._engine.warm(batch, progress=False)
            self.warmed += len(batch)
        except EngineClosedError as error:
            self._log_failure(error, len(batch))
            with self._changed:
                self._stop()
        except Exception as error:
            if len(batch) == 1:
                self._log_failure(error, 1)
            else:  # one document, too long perhaps, must not keep the others cold
                for text in batch:
                    self._warm([text])

    def _log_failure(self, error: Exception, count: int) -> None:
        level = logging.DEBUG if self.failed else logging.WARNING
        logger.log(level, "warming %d documents in the background failed: %s", count, error, exc_info=error)
        self.failed += count


def warm_in_background(
    source: DocumentStore | Iterable[str], engine: WarmingEngine, *, max_pending: int = 10_000
) -> BackgroundWarmer:
    """Warm texts, or the documents of a store and those added to it from now on, without waiting for it.

    A store's own `on_documents` hook is kept and called first. A document added while the older ones are
    still being read may be given to the engine twice; the second time it is warm already. Close the returned
    warmer before the engine.

        with warm_in_background(store, engine) as warmer:
            store.add(texts)
            warmer.flush()
    """
    warmer = BackgroundWarmer(engine, max_pending=max_pending)
    if isinstance(source, DocumentStore):
        # The hook first, so that no document is added unseen between the two.
        source.on_documents = both(source.on_documents, warmer.submit)
        warmer.feed(document.text for document in source.documents())
    else:
        warmer.feed(source)
    return warmer
