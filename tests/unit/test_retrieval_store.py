"""The document store against what its users rely on."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from daric_rag.errors import DaricError
from daric_rag.retrieval import DaricRetriever, DocumentStore, StoredDocument
from daric_rag.retrieval import ingest as ingest_module
from tests.unit.retrieval_support import WordEmbedder

PLACES = ["paris lies in france", "rome lies in italy", "oslo lies in norway"]
HOSTILE = [
    "",
    " ",
    "a\0b",
    "\0",
    "lone \ud800 surrogate",
    "\udfff",
    "{braces} {{ }}",
    "<|im_end|>",
    "x " * 500_000,
]


@pytest.fixture
def store() -> DocumentStore:
    return DocumentStore(embedder=WordEmbedder())


def test_nearest_first_with_cosine_scores(store: DocumentStore) -> None:
    store.add(PLACES, ids=["p", "r", "o"], metadatas=[{"n": 1}, None, {"n": [1, {"a": None}]}])
    found = store.search("paris france", k=3)
    assert found[0].id == "p"
    assert found[0].text == PLACES[0]
    assert found[0].metadata == {"n": 1}
    embedder = WordEmbedder()
    expected = embedder.encode_documents(PLACES) @ embedder.encode_query("paris france")
    assert [document.score for document in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert store.search(PLACES[1], k=1)[0].score == pytest.approx(1.0, abs=1e-5)


def test_search_by_vector_of_any_length(store: DocumentStore) -> None:
    store.add(PLACES, ids=["p", "r", "o"])
    vector = store.embedder.encode_query(PLACES[2]) * 7
    assert store.search(vector, k=1)[0].score == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ValueError, match=r"words.*\[1, 3\].*\[1, 64\]"):
        store.search(np.ones(3, dtype=np.float32))


def test_fewer_documents_than_k(store: DocumentStore) -> None:
    assert store.search("anything") == []
    store.add(PLACES)
    assert len(store.search("anything", k=500)) == 3
    assert len(store) == 3


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "3"])
def test_bad_k(store: DocumentStore, k: int) -> None:
    with pytest.raises(ValueError, match="k="):
        store.search("anything", k=k)
    with pytest.raises(ValueError, match="k="):
        DaricRetriever(store, k=k)


def test_ids_are_given_or_made(store: DocumentStore) -> None:
    ids = store.add(PLACES, ids=["p", None, None])
    assert ids[0] == "p"
    assert len(set(ids)) == 3
    assert [document.text for document in store.get(ids)] == PLACES
    assert store.get(["absent", "p"]) == [StoredDocument("p", PLACES[0])]


def test_add_refuses_existing_and_repeated_ids(store: DocumentStore) -> None:
    store.add(["one"], ids=["a"])
    for texts, ids, named in (
        (["two", "three"], ["b", "a"], "'a'"),
        (["two", "three"], ["c", "c"], "'c' twice"),
    ):
        with pytest.raises(ValueError, match=named):
            store.add(texts, ids=ids)
    assert [document.id for document in store.documents()] == ["a"]


def test_upsert_replaces(store: DocumentStore) -> None:
    store.add(PLACES, ids=["p", "r", "o"])
    assert store.upsert(["lima lies in peru", "bern"], ids=["r", "b"], metadatas=[{"n": 2}, None]) == [
        "r",
        "b",
    ]
    assert len(store) == 4
    assert store.search("lima peru", k=1)[0].id == "r"
    assert store.get(["r"])[0].metadata == {"n": 2}
    assert "italy" not in " ".join(document.text for document in store.search("rome italy", k=10))


def test_upsert_last_of_repeated_ids_stays(store: DocumentStore) -> None:
    assert store.upsert(["one", "two"], ids=["a", "a"]) == ["a", "a"]
    assert store.get(["a"])[0].text == "two"
    assert len(store) == 1


def test_unchanged_text_is_not_embedded_again() -> None:
    embedder = WordEmbedder()
    store = DocumentStore(embedder=embedder)
    store.upsert(PLACES, ids=["p", "r", "o"])
    embedder.encoded.clear()
    store.upsert([*PLACES[:2], "new"], ids=["p", "r", "o"], metadatas=[None, {"n": 1}, None])
    assert embedder.encoded == ["new"]
    assert store.get(["r"])[0].metadata == {"n": 1}
    assert store.search(PLACES[1], k=1)[0].id == "r"


def test_delete_and_add_give_the_right_documents(store: DocumentStore) -> None:
    store.add(PLACES, ids=["p", "r", "o"])
    assert store.delete(["p", "absent"]) == 1
    store.add(["lima lies in peru"], ids=["l"])
    assert store.search("rome italy", k=1)[0].id == "r"
    assert store.search("lima peru", k=1)[0].id == "l"
    assert {document.id for document in store.search("paris", k=10)} == {"r", "o", "l"}
    assert store.clear() == 3
    assert store.search("paris") == []


def test_keys_are_never_used_twice(store: DocumentStore) -> None:
    def largest_key() -> int:
        return max(row.key for rows in store._database.blocks() for row in rows)

    store.add(["one", "two"], ids=["a", "b"])
    before = largest_key()
    store.delete(["a", "b"])
    store.add(["three"], ids=["a"])
    assert largest_key() > before


def test_same_text_under_two_ids(store: DocumentStore) -> None:
    store.add(["same text", "same text"], ids=["a", "b"])
    assert {document.id for document in store.search("same text", k=2)} == {"a", "b"}
    store.delete(["a"])
    assert [document.id for document in store.search("same text", k=2)] == ["b"]


def test_hostile_texts_come_back_as_they_were(store: DocumentStore) -> None:
    ids = store.add(HOSTILE, ids=[f"{n} \ud800\0" for n in range(len(HOSTILE))])
    assert [document.text for document in store.get(ids)] == HOSTILE
    for text in HOSTILE:
        assert len(store.search(text, k=100)) == len(HOSTILE)


def test_hostile_metadata_comes_back(store: DocumentStore) -> None:
    metadata = {"a\0\ud800": "\ud800\0", "big": 10**30, "deep": [[{"": None}]], "float": 1e-300}
    store.add(["text"], [metadata], ["a"])
    assert store.get(["a"])[0].metadata == metadata


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"texts": "one text"}, "texts='one text'"),
        ({"texts": [b"bytes"]}, r"texts\[0\] is bytes"),
        ({"texts": ["a"], "ids": [1]}, r"ids\[0\]=1"),
        ({"texts": ["a"], "ids": ["a", "b"]}, "ids has 2 entries for 1 texts"),
        ({"texts": ["a"], "metadatas": []}, "metadatas has 0 entries"),
        ({"texts": ["a"], "metadatas": [["x"]]}, r"metadatas\[0\] is list"),
        ({"texts": ["a"], "metadatas": [{"when": {1, 2}}]}, "'when'.*not JSON"),
        ({"texts": ["a"], "metadatas": [{3: "x"}]}, "field 3"),
    ],
)
def test_bad_arguments_store_nothing(store: DocumentStore, arguments: dict[str, object], named: str) -> None:
    for method in (store.add, store.upsert):
        with pytest.raises(ValueError, match=named):
            method(**arguments)  # type: ignore[arg-type]
    assert len(store) == 0


def test_filter_finds_k_however_rare(store: DocumentStore) -> None:
    texts = [f"common words {n}" for n in range(1000)]
    store.add(texts, [{"n": n, "rare": n % 250 == 249} for n in range(1000)], [str(n) for n in range(1000)])
    found = store.search("common words 3", k=4, filter={"rare": True})
    assert {document.metadata["n"] for document in found} == {249, 499, 749, 999}
    scores = [document.score for document in found]
    assert scores == sorted(scores, reverse=True)
    assert len(store.search("common", k=5, filter={"n": {"$lt": 3}})) == 3
    assert len(store.search("common", k=5, filter=lambda metadata: metadata["n"] > 500)) == 5
    assert store.search("common", k=5, filter={"n": -1}) == []


def test_filtered_search_is_exact(store: DocumentStore) -> None:
    texts = [f"w{n % 7} w{n % 11} w{n}" for n in range(300)]
    store.add(texts, [{"n": n} for n in range(300)], [str(n) for n in range(300)])
    everything = store.search("w3 w5 w8", k=300)
    for modulus in (2, 50):
        wanted = [found.score for found in everything if found.metadata["n"] % modulus == 0][:5]
        found = store.search("w3 w5 w8", k=5, filter=lambda metadata, m=modulus: metadata["n"] % m == 0)
        assert [document.score for document in found] == pytest.approx(wanted, abs=1e-6)


def test_on_documents_gets_indexed_and_retrieved_texts() -> None:
    indexed: list[str] = []
    retrieved: list[str] = []
    store = DocumentStore(embedder=WordEmbedder(), on_documents=indexed.extend)
    store.upsert(PLACES, ids=["p", "r", "o"])
    store.upsert(PLACES[:1], ids=["p"])
    assert indexed == [*PLACES, PLACES[0]]
    retriever = DaricRetriever(store, k=1, on_documents=retrieved.extend)
    assert [document.id for document in retriever.retrieve("rome italy")] == ["r"]
    assert retrieved == [PLACES[1]]


def test_failing_hook_is_logged_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    def fail(texts: Sequence[str]) -> None:
        raise RuntimeError("hook broke")

    store = DocumentStore(embedder=WordEmbedder(), on_documents=fail)
    with caplog.at_level(logging.ERROR):
        store.add(PLACES)
    assert len(store) == 3
    assert "hook broke" in caplog.text


def test_retriever_settings_and_overrides(store: DocumentStore) -> None:
    store.add(PLACES, [{"n": n} for n in range(3)], ["p", "r", "o"])
    retriever = DaricRetriever(store, k=2, filter={"n": {"$gt": 0}})
    assert {document.id for document in retriever.retrieve("lies in")} == {"r", "o"}
    assert len(retriever.retrieve("lies in", k=1)) == 1
    assert [document.id for document in retriever.retrieve("lies in", filter={"n": 0})] == ["p"]
    strict = DaricRetriever(store, k=3, score_threshold=0.9)
    assert [document.id for document in strict.retrieve(PLACES[0])] == ["p"]
    for bad in ({"score_threshold": 2.0}, {"filter": {"n": {"$near": 1}}}):
        with pytest.raises(ValueError, match=r"score_threshold=2\.0|\$near"):
            DaricRetriever(store, **bad)  # type: ignore[arg-type]


def test_progress_bar(
    store: DocumentStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_module, "PROGRESS_FROM", 1)
    store.add(["not on a terminal"])
    assert capsys.readouterr().err == ""
    shown = DocumentStore(embedder=WordEmbedder(), progress=True)
    shown.upsert(["shown"], ids=["a"])
    shown.upsert(["shown", "more"], ids=["a", "b"])
    assert "2/2" in capsys.readouterr().err


def test_threads_add_search_and_delete_at_once(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path, WordEmbedder())
    errors: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for n in range(20):
                store.add([f"text {worker} number {n}"], ids=[f"{worker}-{n}"])
                # No other thread removes it, and nothing is nearer to its own text.
                assert store.search(f"text {worker} number {n}", k=1)[0].score > 0.99
                if n % 2:
                    store.delete([f"{worker}-{n}"])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert {document.id for document in store.documents()} == {
        f"{w}-{n}" for w in range(6) for n in range(0, 20, 2)
    }
    assert len(store.search("text", k=1000)) == 60
    store.close()


def test_closed_store_says_so(store: DocumentStore) -> None:
    store.close()
    store.close()
    for call in (
        lambda: store.search("a"),
        lambda: store.add(["a"]),
        lambda: len(store),
        lambda: store.get(["a"]),
    ):
        with pytest.raises(DaricError, match="closed"):
            call()
