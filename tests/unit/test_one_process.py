"""Objects after a fork, in copies, and on the way into a pickle.

The locks are held while the child is forked, as a busy thread of the parent holds them: whoever waits hangs.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from daric_rag.engine.tokenizer import ExclusiveTokenizer
from daric_rag.one_process import OneProcess
from daric_rag.retrieval import BackgroundWarmer, DocumentStore, SentenceTransformerEmbedder
from tests.character_tokenizer import CharacterTokenizer
from tests.process_support import in_fork
from tests.unit.retrieval_support import WordEmbedder


class Engine:
    """The part of an engine that a warmer needs."""

    def warm(self, documents: Any, *, progress: bool | None = None) -> None:
        """Nothing to compute."""


@dataclasses.dataclass
class Holder:
    held: Any


STORE_CALLS: dict[str, Callable[[DocumentStore], object]] = {
    "search": lambda store: store.search("paris"),
    "add": lambda store: store.add(["oslo"]),
    "upsert": lambda store: store.upsert(["oslo"], ids=["p"]),
    "delete": lambda store: store.delete(["p"]),
    "get": lambda store: store.get(["p"]),
    "documents": lambda store: list(store.documents()),
    "vectors": lambda store: store.vectors(["p"]),
    "len": lambda store: len(store),
    "save": lambda store: store.save(),
}


def assert_names_the_fork(answer: str) -> None:
    assert answer.startswith("DaricError: ")
    assert f"belongs to process {os.getpid()}" in answer
    assert "forked" in answer
    assert "after the fork" in answer


@pytest.mark.parametrize("call", STORE_CALLS)
def test_a_store_after_a_fork(call: str, tmp_path: Any) -> None:
    with DocumentStore(tmp_path / "index", WordEmbedder()) as store:
        store.add(["paris lies in france"], ids=["p"])
        with store._database._lock:
            assert_names_the_fork(in_fork(lambda: STORE_CALLS[call](store)))
        assert [found.id for found in store.search("paris")] == ["p"]


def test_the_childs_end_leaves_the_store_alone(tmp_path: Any) -> None:
    with DocumentStore(tmp_path / "index", WordEmbedder()) as store:
        store.add(["paris lies in france"], ids=["p"])
        with store._database._lock:
            assert in_fork(store.close) == "None"
        assert not (tmp_path / "index" / "vectors.faiss").exists()
        assert len(store) == 1


def test_an_embedder_after_a_fork() -> None:
    embedder = SentenceTransformerEmbedder()
    # Not used yet, it is nobody's: a server may make it first and fork afterwards.
    assert in_fork(lambda: embedder.is_elsewhere) == "False"
    embedder.check_process()
    with embedder._lock:
        for call in (lambda: embedder.dim, lambda: embedder.encode_query("x")):
            assert_names_the_fork(in_fork(call))
        assert_names_the_fork(in_fork(lambda: embedder.encode_documents(["x"])))


def test_a_tokenizer_after_a_fork() -> None:
    tokenizer = ExclusiveTokenizer(CharacterTokenizer())
    with tokenizer._lock:
        assert_names_the_fork(in_fork(lambda: tokenizer("x")))


def test_a_warmer_after_a_fork() -> None:
    with BackgroundWarmer(Engine()) as warmer:
        with warmer._changed:
            assert_names_the_fork(in_fork(lambda: warmer.submit(["x"])))
            assert_names_the_fork(in_fork(lambda: warmer.feed(["x"])))
            assert_names_the_fork(in_fork(warmer.flush))
            assert in_fork(warmer.close) == "None"
        warmer.submit(["x"])
        assert warmer.flush(10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExclusiveTokenizer(CharacterTokenizer()),
        lambda: DocumentStore(embedder=WordEmbedder())._database,
        SentenceTransformerEmbedder,
        lambda: BackgroundWarmer(Engine()),
    ],
)
def test_copies_share_and_pickles_say_why_not(make: Callable[[], OneProcess]) -> None:
    original = make()
    holder = Holder(original)
    assert copy.copy(original) is original
    assert copy.deepcopy(holder).held is original
    assert dataclasses.asdict(holder)["held"] is original
    with pytest.raises(TypeError, match=f"{original.kind} cannot be pickled.*belong to this process"):
        pickle.dumps(holder)


def test_a_copied_store_is_the_same_store() -> None:
    with DocumentStore(embedder=WordEmbedder()) as store:
        store.add(["paris lies in france"], ids=["p"])
        assert len(copy.deepcopy(store)) == 1
        with pytest.raises(TypeError, match="document store cannot be pickled"):
            pickle.dumps(store)


def test_threads_of_one_process_share() -> None:
    embedder = SentenceTransformerEmbedder()
    embedder.check_process()
    errors: list[BaseException] = []

    def use() -> None:
        try:
            embedder.check_process()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert errors == []
