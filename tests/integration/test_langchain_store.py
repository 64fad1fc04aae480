"""LangChain's standard suites and what they leave out: scores, filters, marginal relevance, hooks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from langchain_tests.integration_tests import RetrieversIntegrationTests, VectorStoreIntegrationTests

from daric_rag.errors import IndexMismatchError
from daric_rag.integrations.langchain_store import (
    DaricLangChainRetriever,
    DaricVectorStore,
    EmbedderEmbeddings,
    LangChainEmbedder,
)
from daric_rag.retrieval import DocumentStore
from tests.unit.retrieval_support import WordEmbedder

PLACES = ["paris lies in france", "rome lies in italy", "oslo lies in norway"]


class TestVectorStoreInMemory(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self) -> Iterator[VectorStore]:  # type: ignore[override]
        vector_store = DaricVectorStore(self.get_embeddings())
        yield vector_store
        vector_store.store.close()


class TestVectorStoreOnDisk(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, tmp_path: Path) -> Iterator[VectorStore]:  # type: ignore[override]
        vector_store = DaricVectorStore(self.get_embeddings(), path=tmp_path)
        yield vector_store
        vector_store.store.close()


class TestRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return DaricLangChainRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        store = DocumentStore(embedder=WordEmbedder())
        store.add([*PLACES, "lima lies in peru"])
        return {"store": store}

    @property
    def retriever_query_example(self) -> str:
        return "what lies in italy"


@pytest.fixture
def places() -> DaricVectorStore:
    return DaricVectorStore.from_texts(
        PLACES, WordEmbedder(), [{"n": n} for n in range(3)], ids=["p", "r", "o"]
    )


def test_scores_are_similarities_and_relevances(places: DaricVectorStore) -> None:
    scored = places.similarity_search_with_score(PLACES[0], k=3)
    assert scored[0][0].id == "p"
    assert scored[0][1] == pytest.approx(1.0, abs=1e-5)
    relevant = places.similarity_search_with_relevance_scores(PLACES[0], k=3)
    assert all(0 <= relevance <= 1 for _, relevance in relevant)
    retriever = places.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"k": 3, "score_threshold": 0.99}
    )
    assert [document.id for document in retriever.invoke(PLACES[0])] == ["p"]


def test_filters_and_vectors(places: DaricVectorStore) -> None:
    retriever = places.as_retriever(search_kwargs={"k": 3, "filter": {"n": {"$gte": 1}}})
    assert {document.id for document in retriever.invoke("lies in")} == {"r", "o"}
    vector = places.embeddings.embed_query(PLACES[2])
    assert places.similarity_search_by_vector(vector, k=1, filter=lambda m: m["n"] < 2)[0].id != "o"
    assert places.similarity_search_by_vector(vector, k=1)[0].id == "o"


def test_marginal_relevance_avoids_repetition() -> None:
    texts = ["red fox", "red fox", "red fox", "red hen"]
    vector_store = DaricVectorStore.from_texts(texts, WordEmbedder(), ids=["a", "b", "c", "d"])
    assert "d" not in {document.id for document in vector_store.similarity_search("red fox", k=2)}
    assert [d.id for d in vector_store.max_marginal_relevance_search("red fox", k=2, lambda_mult=0.3)][
        1
    ] == "d"
    relevance_only = vector_store.max_marginal_relevance_search("red fox", k=4, lambda_mult=1.0)
    assert relevance_only[-1].id == "d"
    retriever = vector_store.as_retriever(search_type="mmr", search_kwargs={"k": 2, "fetch_k": 4})
    assert len(retriever.invoke("red fox")) == 2
    assert DaricVectorStore(WordEmbedder()).max_marginal_relevance_search("red fox") == []


def test_marginal_relevance_equals_the_definition() -> None:
    words = ["red", "blue", "fox", "hen", "owl", "big"]
    texts = [f"{a} {b}" for a in words for b in words]
    vector_store = DaricVectorStore.from_texts(texts, WordEmbedder(), ids=texts)
    embed = WordEmbedder().encode_query
    query = embed("red fox owl")
    chosen: list[str] = []
    while len(chosen) < 5:
        chosen.append(
            max(
                (text for text in texts if text not in chosen),
                key=lambda text: (
                    0.5 * float(embed(text) @ query)
                    - 0.5 * max((float(embed(text) @ embed(other)) for other in chosen), default=0.0)
                ),
            )
        )
    found = vector_store.max_marginal_relevance_search("red fox owl", k=5, fetch_k=len(texts))
    assert [sorted(d.page_content.split()) for d in found] == [sorted(text.split()) for text in chosen]


def test_async_variants(places: DaricVectorStore) -> None:
    async def run() -> None:
        assert (await places.asimilarity_search_with_score(PLACES[1], k=1))[0][0].id == "r"
        assert (await places.amax_marginal_relevance_search(PLACES[1], k=1))[0].id == "r"
        vector = places.embeddings.embed_query(PLACES[0])
        assert (await places.asimilarity_search_by_vector(vector, k=1))[0].id == "p"
        assert await places.aadd_texts(["lima"], ids=["l"]) == ["l"]
        assert (await places.as_retriever(search_kwargs={"k": 1}).ainvoke("lima"))[0].id == "l"
        other = await DaricVectorStore.afrom_texts(PLACES, WordEmbedder())
        assert len(await other.asimilarity_search("paris", k=9)) == 3

    asyncio.run(run())


def test_misspelt_options_are_refused(places: DaricVectorStore) -> None:
    for call in (
        lambda: places.similarity_search("a", filters={}),
        lambda: places.max_marginal_relevance_search("a", lambda_mul=1.0),
        lambda: places.delete(["p"], force=True),
        lambda: places.add_documents([Document("a")], id=["x"]),
    ):
        with pytest.raises(TypeError, match="unknown option"):
            call()
    with pytest.raises(ValueError, match="lambda_mult=2"):
        places.max_marginal_relevance_search("a", lambda_mult=2)
    with pytest.raises(ValueError, match="top_k"):
        DaricLangChainRetriever(store=places.store, top_k=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="k=0"):
        DaricLangChainRetriever(store=places.store, k=0)
    with pytest.raises(ValueError, match="either"):
        DaricVectorStore(WordEmbedder(), store=places.store)


def test_delete_all(places: DaricVectorStore) -> None:
    assert places.delete() is True
    assert places.similarity_search("paris") == []


def test_hook_gets_indexed_and_retrieved_texts() -> None:
    seen: list[str] = []
    vector_store = DaricVectorStore(WordEmbedder(), on_documents=seen.extend)
    vector_store.add_texts(PLACES, ids=["p", "r", "o"])
    assert seen == PLACES
    seen.clear()
    vector_store.as_retriever(search_kwargs={"k": 1}).invoke("rome italy")
    vector_store.max_marginal_relevance_search("oslo norway", k=1)
    retriever = DaricLangChainRetriever(store=vector_store.store, k=1, on_documents=seen.extend)
    retriever.invoke("paris france")
    asyncio.run(retriever.ainvoke("paris france"))
    assert seen == [PLACES[1], PLACES[2], PLACES[0], PLACES[0]]


def test_retriever_filter_and_threshold(places: DaricVectorStore) -> None:
    retriever = DaricLangChainRetriever(store=places.store, k=3, filter={"n": 2})
    assert [document.id for document in retriever.invoke("lies in")] == ["o"]
    assert [document.id for document in retriever.invoke("lies in", filter={"n": 1})] == ["r"]
    strict = DaricLangChainRetriever(store=places.store, k=3, score_threshold=0.99)
    assert [document.id for document in strict.invoke(PLACES[1])] == ["r"]


@pytest.mark.parametrize("text", ["", "a\0b", "lone \ud800", "{braces}", "<|im_end|>", "x " * 500_000])
def test_hostile_documents(text: str) -> None:
    vector_store = DaricVectorStore(WordEmbedder())
    ids = vector_store.add_documents([Document(page_content=text)])
    assert vector_store.get_by_ids(ids)[0].page_content == text
    assert vector_store.similarity_search(text, k=500)[0].page_content == text


def test_embedders_in_both_directions(tmp_path: Path) -> None:
    inner = EmbedderEmbeddings(WordEmbedder())
    adapted = LangChainEmbedder(inner)
    assert adapted.name == "EmbedderEmbeddings"
    assert LangChainEmbedder(inner, "mine").name == "mine"
    assert adapted.dim == 64
    with_vectors = DaricVectorStore(inner, path=tmp_path)
    assert with_vectors.embeddings is inner
    with_vectors.store.close()
    with pytest.raises(IndexMismatchError, match=r"'EmbedderEmbeddings'.*'words'"):
        DaricVectorStore(WordEmbedder(), path=tmp_path)
