"""LangChain vector store and retriever over a `DocumentStore` (extras `langchain` and `retrieval`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import VectorStore
from pydantic import ConfigDict, PrivateAttr

from daric_rag.retrieval.database import StoredDocument
from daric_rag.retrieval.document_store import DocumentStore, RetrievedDocument, check_k
from daric_rag.retrieval.embedder import Embedder
from daric_rag.retrieval.embedder import Embeddings as Vectors
from daric_rag.retrieval.filters import Filter
from daric_rag.retrieval.hooks import OnDocuments, both, notify
from daric_rag.retrieval.retriever import DaricRetriever


class LangChainEmbedder:
    """Any LangChain `Embeddings` as an `Embedder`; vectors are normalised.

    `name` identifies the model in a stored index; by default it is made of the class and the model's name.
    """

    def __init__(self, embeddings: Embeddings, name: str | None = None) -> None:
        self.embeddings = embeddings
        self._name = name or _model_name(embeddings)
        self._dim: int | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def dim(self) -> int:
        if self._dim is None:
            self._dim = len(self.embeddings.embed_query("dimension"))
        return self._dim

    def encode_documents(self, texts: list[str]) -> Vectors:
        return _unit(np.asarray(self.embeddings.embed_documents(texts), dtype=np.float32))

    def encode_query(self, text: str) -> Vectors:
        return _unit(np.asarray(self.embeddings.embed_query(text), dtype=np.float32))


class EmbedderEmbeddings(Embeddings):
    """An `Embedder` as LangChain `Embeddings`."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Vectors of documents."""
        vectors: list[list[float]] = self.embedder.encode_documents(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Vector of a query."""
        vector: list[float] = self.embedder.encode_query(text).tolist()
        return vector


class DaricVectorStore(VectorStore):
    """A `DocumentStore` as LangChain vector store.

    `embedding` is a LangChain `Embeddings`, an `Embedder`, or None for the embedded default; `path` a
    directory or None for memory; or give an open `store`. `on_documents` is called with the texts indexed
    and retrieved. Scores are cosine similarities. Filters are those of `compile_filter` (a callable gets the
    metadata). The async methods run in threads, because embedding and search are computations. Metadata must
    be JSON.

        vector_store = DaricVectorStore(path="index")
        vector_store.add_documents(documents)
        retriever = vector_store.as_retriever(search_kwargs={"k": 4, "filter": {"lang": "en"}})
    """

    def __init__(
        self,
        embedding: Embeddings | Embedder | None = None,
        *,
        path: str | Path | None = None,
        store: DocumentStore | None = None,
        on_documents: OnDocuments | None = None,
    ) -> None:
        if store is not None and (embedding is not None or path is not None):
            raise ValueError("store has its own embedder and path: give either store, or embedding and path")
        embedder = LangChainEmbedder(embedding) if isinstance(embedding, Embeddings) else embedding
        self.store = DocumentStore(path, embedder) if store is None else store
        self.on_documents = on_documents
        if on_documents is not None:
            self.store.on_documents = both(self.store.on_documents, on_documents)

    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | Embedder | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> "DaricVectorStore":
        """Make a store and add texts; `kwargs` are those of the constructor."""
        vector_store = cls(embedding, **kwargs)
        vector_store.add_texts(texts, metadatas, ids=ids)
        return vector_store

    @property
    def embeddings(self) -> Embeddings:
        """The embedder, as LangChain `Embeddings`."""
        embedder = self.store.embedder
        return (
            embedder.embeddings if isinstance(embedder, LangChainEmbedder) else EmbedderEmbeddings(embedder)
        )

    def add_documents(self, documents: list[Document], **kwargs: Any) -> list[str]:
        """Add documents or replace those with the same id; `ids=` goes before the documents' own."""
        ids = kwargs.pop("ids", None)
        _refuse("add_documents", kwargs, "ids")
        return self.store.upsert(
            [document.page_content for document in documents],
            [document.metadata for document in documents],
            [document.id for document in documents] if ids is None else ids,
        )

    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """The documents with these ids, in this order; unknown ids are left out."""
        return [_document(found) for found in self.store.get(ids)]

    def delete(self, ids: list[str] | None = None, **kwargs: Any) -> bool:
        """Delete documents; unknown ids are ignored, and None deletes all."""
        _refuse("delete", kwargs)
        if ids is None:
            self.store.clear()
        else:
            self.store.delete(ids)
        return True

    def similarity_search(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The `k` documents nearest to a text."""
        return [document for document, _ in self.similarity_search_with_score(query, k, filter, **kwargs)]

    def similarity_search_with_score(
        self, query: str, k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """The `k` documents nearest to a text, each with its cosine similarity."""
        _refuse("similarity_search", kwargs, "k", "filter")
        return [(_document(found), found.score) for found in self._search(query, k, filter)]

    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, filter: Filter | None = None, **kwargs: Any
    ) -> list[Document]:
        """The `k` documents nearest to an embedding."""
        _refuse("similarity_search_by_vector", kwargs, "k", "filter")
        return [_document(found) for found in self._search(np.asarray(embedding, np.float32), k, filter)]

    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """`k` of the `fetch_k` nearest documents, chosen to differ from each other (1 - `lambda_mult`)."""
        vector = self.store.embedder.encode_query(query)
        return self.max_marginal_relevance_search_by_vector(
            vector.tolist(), k, fetch_k, lambda_mult, filter, **kwargs
        )

    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        filter: Filter | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """`max_marginal_relevance_search` for an embedding."""
        _refuse("max_marginal_relevance_search", kwargs, "k", "fetch_k", "lambda_mult", "filter")
        check_k(k)
        if not 0.0 <= lambda_mult <= 1.0:
            raise ValueError(f"lambda_mult={lambda_mult!r}: must be between 0 and 1")
        found = self.store.search(np.asarray(embedding, np.float32), max(k, fetch_k), filter)
        vectors = self.store.vectors([document.id for document in found])
        scores = np.array([document.score for document in found], dtype=np.float32)
        chosen = [found[position] for position in _most_marginal(scores, vectors, k, lambda_mult)]
        notify(self.on_documents, [document.text for document in chosen])
        return [_document(document) for document in chosen]

    def _search(self, query: str | Vectors, k: int, filter: Filter | None) -> list[RetrievedDocument]:
        return DaricRetriever(self.store, k, filter=filter, on_documents=self.on_documents).retrieve(query)

    def _select_relevance_score_fn(self) -> Callable[[float], float]:
        # Cosine similarity is the relevance already; opposite directions are as irrelevant as unrelated ones.
        return lambda score: min(1.0, max(0.0, score))


class DaricLangChainRetriever(BaseRetriever):
    """A `DocumentStore` as LangChain retriever; the fields are those of `DaricRetriever`.

    retriever = DaricLangChainRetriever(store=store, k=4)
    retriever.invoke("Where is Paris?", k=2)
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    store: DocumentStore
    k: int = 4
    filter: Any = None
    score_threshold: float | None = None
    on_documents: Any = None
    _retriever: DaricRetriever = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Check the fields."""
        super().model_post_init(context)
        self._retriever = DaricRetriever(
            self.store,
            self.k,
            filter=self.filter,
            score_threshold=self.score_threshold,
            on_documents=self.on_documents,
        )

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: Filter | None = None,
    ) -> list[Document]:
        return [_document(found) for found in self._retriever.retrieve(query, k, filter)]

    async def _aget_relevant_documents(
        self,
        query: str,
        *,
        run_manager: AsyncCallbackManagerForRetrieverRun,
        k: int | None = None,
        filter: Filter | None = None,
    ) -> list[Document]:
        return [_document(found) for found in await self._retriever.aretrieve(query, k, filter)]


def _document(found: RetrievedDocument | StoredDocument) -> Document:
    return Document(id=found.id, page_content=found.text, metadata=found.metadata)


def _model_name(embeddings: Embeddings) -> str:
    for attribute in ("model_name", "model"):
        if isinstance(value := getattr(embeddings, attribute, None), str):
            return f"{type(embeddings).__name__}:{value}"
    return type(embeddings).__name__


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Vectors = np.divide(vectors, lengths, out=np.zeros_like(vectors), where=lengths > 0)
    return unit


def _most_marginal(scores: Vectors, vectors: Vectors, k: int, lambda_mult: float) -> list[int]:
    """Positions by maximal marginal relevance (Carbonell and Goldstein 1998).

    `scores` are similarities with the query, [n]; `vectors` are normalised, [n, dim].
    """
    chosen: list[int] = []
    redundancy = np.full(len(scores), -np.inf, dtype=np.float32)  # largest similarity with a chosen one
    while len(chosen) < min(k, len(scores)):
        penalty = redundancy if chosen else np.zeros_like(scores)
        value = lambda_mult * scores - (1 - lambda_mult) * penalty
        value[chosen] = -np.inf
        chosen.append(int(np.argmax(value)))
        redundancy = np.maximum(redundancy, vectors @ vectors[chosen[-1]])
    return chosen


def _refuse(method: str, unknown: dict[str, Any], *allowed: str) -> None:
    if unknown:
        raise TypeError(
            f"{method}: unknown option {next(iter(unknown))!r}; allowed are {', '.join(allowed) or 'none'}"
        )
