"""Warming in the background, with engines that note, fail, or block."""

import logging
import threading
from collections.abc import Sequence

import pytest

from daric_rag.errors import EngineClosedError
from daric_rag.retrieval import BackgroundWarmer, DocumentStore, warm_in_background
from tests.unit.retrieval_support import WordEmbedder

WAIT = 30.0


class NotingEngine:
    """Notes what it is asked to warm; waits for `gate` before every batch; raises `error` if it has one."""

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None) -> None:
        self.warmed: list[str] = []
        self.batches: list[int] = []
        self.started = threading.Event()
        self._error = error
        self._gate = gate

    def warm(self, documents: Sequence[str], *, progress: bool | None = None) -> None:
        assert progress is False  # a bar of its own thread would garble the terminal
        self.started.set()
        if self._gate is not None:
            assert self._gate.wait(WAIT)
        if self._error is not None:
            raise self._error
        if "too long" in documents:
            raise ValueError("a document is longer than the window")
        self.warmed += documents
        self.batches.append(len(documents))


def test_store_and_later_documents_are_warmed() -> None:
    seen: list[str] = []
    store = DocumentStore(embedder=WordEmbedder(), on_documents=seen.extend)
    store.add([f"old {n}" for n in range(40)])
    engine = NotingEngine()
    with warm_in_background(store, engine) as warmer:
        store.add(["new 1", "new 2"])
        assert warmer.flush(WAIT)
        assert set(engine.warmed) == {document.text for document in store.documents()}
        assert warmer.warmed == len(engine.warmed)
        assert max(engine.batches) <= 16
    assert len(seen) == 42  # the hook that was there goes on being called
    store.add(["after close"])
    assert "after close" not in engine.warmed


def test_texts_are_read_as_the_engine_gets_to_them() -> None:
    read: list[int] = []
    gate = threading.Event()

    def texts():  # type: ignore[no-untyped-def]
        for n in range(100):
            read.append(n)
            yield str(n)

    engine = NotingEngine(gate=gate)
    with warm_in_background(texts(), engine) as warmer:
        assert engine.started.wait(WAIT)
        assert len(read) == 16
        assert not warmer.flush(0.01)
        gate.set()
        assert warmer.flush(WAIT)
        assert engine.warmed == [str(n) for n in range(100)]
        warmer.feed(["more"])
        assert warmer.flush(WAIT)
        assert engine.warmed[-1] == "more"


def test_full_queue_drops_and_counts(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    engine = NotingEngine(gate=gate)
    with BackgroundWarmer(engine, max_pending=3) as warmer:
        warmer.submit(["first"])
        assert engine.started.wait(WAIT)
        warmer.submit(["a", "b", "c", "d", "e"])
        warmer.submit(["f"])
        assert warmer.dropped == 3
        gate.set()
        assert warmer.flush(WAIT)
        assert engine.warmed == ["first", "a", "b", "c"]
    assert caplog.text.count("wait to be warmed") == 1


def test_errors_are_logged_once_and_warming_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    engine = NotingEngine(error=RuntimeError("engine broke"))
    store = DocumentStore(embedder=WordEmbedder())
    with caplog.at_level(logging.WARNING), warm_in_background(store, engine) as warmer:
        assert warmer.flush(WAIT)  # the (empty) store was read
        for n in range(3):
            store.add([f"text {n}"])
            assert warmer.flush(WAIT)
        assert warmer.failed == 3
        engine._error = None
        store.add(["good"])
        assert warmer.flush(WAIT)
    assert engine.warmed == ["good"]
    assert sum("engine broke" in record.getMessage() for record in caplog.records) == 1


def test_one_bad_document_does_not_keep_others_cold() -> None:
    engine = NotingEngine()
    with warm_in_background(["a", "too long", "b"], engine) as warmer:
        assert warmer.flush(WAIT)
        assert (engine.warmed, warmer.warmed, warmer.failed) == (["a", "b"], 2, 1)


def test_closed_engine_ends_the_warmer() -> None:
    engine = NotingEngine(error=EngineClosedError("closed"))
    warmer = BackgroundWarmer(engine)
    warmer.feed(str(n) for n in range(1000))
    assert warmer.flush(WAIT)
    warmer.close(WAIT)
    assert warmer.failed == 16
    warmer.submit(["ignored"])
    assert warmer.flush(WAIT)


def test_close_drops_what_waits() -> None:
    gate = threading.Event()
    engine = NotingEngine(gate=gate)
    warmer = BackgroundWarmer(engine)
    warmer.submit([str(n) for n in range(100)])
    assert engine.started.wait(WAIT)
    threading.Timer(0.05, gate.set).start()
    warmer.close(WAIT)
    warmer.close(WAIT)
    assert len(engine.warmed) == 16


def test_failing_source_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def texts():  # type: ignore[no-untyped-def]
        yield "one"
        raise RuntimeError("source broke")

    engine = NotingEngine()
    with warm_in_background(texts(), engine) as warmer:
        assert warmer.flush(WAIT)
    assert "source broke" in caplog.text


def test_bad_bound() -> None:
    with pytest.raises(ValueError, match="max_pending=0"):
        BackgroundWarmer(NotingEngine(), max_pending=0)
