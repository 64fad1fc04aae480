"""Retrieval with the embedded model, real processes, and LlamaIndex."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from llama_index.core.schema import MetadataMode, QueryBundle

from benchmarks import retrieval
from daric_rag.integrations.llama_index_retriever import DaricLlamaIndexRetriever
from daric_rag.retrieval import DaricRetriever, DocumentStore, SentenceTransformerEmbedder
from tests.unit.retrieval_support import WordEmbedder

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
TEXTS = [
    "The Seine flows through the capital of France.",
    "Photosynthesis turns light into sugar.",
    "The violin has four strings.",
]
HOSTILE = ["", " ", "a\0b", "\0", "lone \ud800 surrogate", "<|im_end|>", "x " * 500_000, "y" * 1_000_000]


@pytest.fixture(scope="module")
def embedder() -> SentenceTransformerEmbedder:
    return SentenceTransformerEmbedder()


def test_finds_by_meaning(embedder: SentenceTransformerEmbedder) -> None:
    store = DocumentStore(embedder=embedder)
    store.add(TEXTS, ids=["paris", "plant", "violin"])
    questions = {
        "How do plants make food?": "plant",
        "Which instrument do I bow?": "violin",
        "Paris?": "paris",
    }
    for question, expected in questions.items():
        assert DaricRetriever(store, k=1).retrieve(question)[0].id == expected
        assert asyncio.run(DaricRetriever(store, k=1).aretrieve(question))[0].id == expected


def test_vectors_are_normalised_and_independent_of_the_batch(embedder: SentenceTransformerEmbedder) -> None:
    assert embedder.dim == 384
    vectors = embedder.encode_documents([*TEXTS, *HOSTILE])
    assert vectors.shape == (len(TEXTS) + len(HOSTILE), 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(embedder.encode_documents(TEXTS[:1])[0], vectors[0], atol=1e-5)
    assert embedder.encode_documents([]).shape == (0, 384)


def test_cutting_huge_texts_changes_nothing(embedder: SentenceTransformerEmbedder) -> None:
    long = "word and more words " * 10_000
    np.testing.assert_allclose(embedder.encode_query(long), embedder.encode_query(long[:20_000]), atol=1e-6)


def test_hostile_texts(embedder: SentenceTransformerEmbedder) -> None:
    store = DocumentStore(embedder=embedder)
    ids = store.add(HOSTILE)
    assert [document.text for document in store.get(ids)] == HOSTILE
    for text in HOSTILE:
        assert len(store.search(text, k=500)) == len(HOSTILE)


def test_embedder_in_many_threads(embedder: SentenceTransformerEmbedder) -> None:
    expected = embedder.encode_documents(TEXTS)
    results: list[np.ndarray] = []

    def encode() -> None:
        results.append(embedder.encode_documents(TEXTS))
        results.append(np.array([embedder.encode_query(text) for text in TEXTS]))

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for result in results:
        np.testing.assert_allclose(result, expected, atol=1e-5)


WRITER = """
import sys
from daric_rag.retrieval import DocumentStore
from tests.unit.retrieval_support import WordEmbedder
store = DocumentStore(sys.argv[1], WordEmbedder())
for n in range(max(0, len(store) - 1), 100_000):
    store.upsert([f"document {n}", f"shared {n}"], ids=[str(n), "shared"])
    if n % 7 == 0:
        store.save()
    print(n, flush=True)
"""


def write_and_kill(directory: Path, documents: int) -> int:
    """Let another process add documents and kill it; the number of the last one it was told is stored."""
    command = [sys.executable, "-c", WRITER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        last = -1
        for _ in range(documents):
            last = int(process.stdout.readline())
        time.sleep(0.001 * (documents % 5))
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
    return int(rest[-1]) if rest else last


def test_killed_while_writing(tmp_path: Path) -> None:
    for documents in (1, 12, 23, 41):
        last = write_and_kill(tmp_path, documents)
        with DocumentStore(tmp_path, WordEmbedder()) as store:
            texts = {document.id: document.text for document in store.documents()}
            assert set(map(str, range(last + 1))) <= set(texts)
            newest = texts["shared"]
            assert newest in (f"shared {last}", f"shared {last + 1}")
            for text in (f"document {last}", "document 0", newest):
                assert store.search(text, k=1)[0].text == text
            assert len(store.search("document", k=10_000)) == len(texts)


def test_two_processes_write_one_directory(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from daric_rag.retrieval import DocumentStore\n"
        "from tests.unit.retrieval_support import WordEmbedder\n"
        "with DocumentStore(sys.argv[1], WordEmbedder()) as store:\n"
        "    for n in range(25):\n"
        "        store.add([f'{sys.argv[2]} {n}'], ids=[f'{sys.argv[2]} {n}'])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "new")]
    processes = [subprocess.Popen([*command, name], cwd=REPOSITORY) for name in ("one", "two")]
    assert [process.wait() for process in processes] == [0, 0]
    with DocumentStore(tmp_path / "new", WordEmbedder()) as store:
        assert len(store) == 50
        for name in ("one", "two"):
            for n in range(25):
                assert store.search(f"{name} {n}", k=1)[0].id == f"{name} {n}"


@pytest.fixture
def store() -> DocumentStore:
    store = DocumentStore(embedder=WordEmbedder())
    store.add(["red fox", "red hen", "grey owl"], [{"n": n} for n in range(3)], ["f", "h", "o"])
    return store


def test_llama_index_nodes(store: DocumentStore) -> None:
    seen: list[str] = []
    retriever = DaricLlamaIndexRetriever(store, k=2, on_documents=seen.extend)
    for nodes in (retriever.retrieve("red fox"), asyncio.run(retriever.aretrieve("red fox"))):
        assert [node.node.node_id for node in nodes] == ["f", "h"]
        assert nodes[0].score == pytest.approx(1.0, abs=1e-5)
        assert nodes[0].node.metadata == {"n": 0}
        assert nodes[0].node.get_content(MetadataMode.NONE) == "red fox"
    assert seen == ["red fox", "red hen"] * 2


def test_llama_index_settings(store: DocumentStore) -> None:
    filtered = DaricLlamaIndexRetriever(store, k=5, filter={"n": {"$gt": 0}})
    assert {node.node.node_id for node in filtered.retrieve("red fox")} == {"h", "o"}
    bundle = QueryBundle("red fox", embedding=WordEmbedder().encode_query("grey owl").tolist())
    assert DaricLlamaIndexRetriever(store, k=1).retrieve(bundle)[0].node.node_id == "o"
    assert DaricLlamaIndexRetriever(DocumentStore(embedder=WordEmbedder())).retrieve("red") == []
    with pytest.raises(ValueError, match="k=0"):
        DaricLlamaIndexRetriever(store, k=0)
    with pytest.raises(TypeError, match="top_k"):
        DaricLlamaIndexRetriever(store, top_k=3)


@pytest.mark.parametrize("text", ["", "a\0b", "lone \ud800", "{braces}", "x " * 500_000])
def test_llama_index_hostile_texts(text: str) -> None:
    store = DocumentStore(embedder=WordEmbedder())
    store.add([text])
    assert DaricLlamaIndexRetriever(store).retrieve("anything")[0].node.get_content(MetadataMode.NONE) == text


def test_benchmark_on_its_sample(tmp_path: Path) -> None:
    figures = retrieval.measure(tmp_path, retrieval.read_passages(None), 5, WordEmbedder())
    assert figures["passages"] == 200
    assert all(value > 0 for value in figures.values())
