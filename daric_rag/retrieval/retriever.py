"""The retriever: a document store with its search settings."""

import asyncio

from daric_rag.retrieval.document_store import DocumentStore, RetrievedDocument, check_k
from daric_rag.retrieval.embedder import Embeddings
from daric_rag.retrieval.filters import Filter, compile_filter
from daric_rag.retrieval.hooks import OnDocuments, notify


class DaricRetriever:
    """Finds the `k` documents of a store that are nearest to a query.

    `filter` is a metadata filter (`compile_filter`); documents scoring below `score_threshold` (cosine
    similarity, -1 to 1) are left out; `on_documents` is called with the texts of every result.

        retriever = DaricRetriever(store, k=4)
        for document in retriever.retrieve("Where is Paris?"):
            print(document.id, document.score, document.text)

    Raises `ValueError` naming the field for a bad `k`, filter or threshold.
    """

    def __init__(
        self,
        store: DocumentStore,
        k: int = 4,
        *,
        filter: Filter | None = None,
        score_threshold: float | None = None,
        on_documents: OnDocuments | None = None,
    ) -> None:
        check_k(k)
        check_threshold(score_threshold)
        compile_filter(filter)
        self.store = store
        self.k = k
        self.filter = filter
        self.score_threshold = score_threshold
        self.on_documents = on_documents

    def retrieve(
        self, query: str | Embeddings, k: int | None = None, filter: Filter | None = None
    ) -> list[RetrievedDocument]:
        """Documents for a query (text or embedding), best first; `k` and `filter` override the settings."""
        chosen = self.filter if filter is None else filter
        documents = self.store.search(query, self.k if k is None else k, chosen)
        if self.score_threshold is not None:
            documents = [document for document in documents if document.score >= self.score_threshold]
        notify(self.on_documents, [document.text for document in documents])
        return documents

    async def aretrieve(
        self, query: str | Embeddings, k: int | None = None, filter: Filter | None = None
    ) -> list[RetrievedDocument]:
        """`retrieve` in a thread, so that the event loop goes on (embedding and search release the GIL)."""
        return await asyncio.to_thread(self.retrieve, query, k, filter)


def check_threshold(score_threshold: float | None) -> None:
    """Raise `ValueError` unless `score_threshold` is None or a cosine similarity."""
    if score_threshold is not None and not -1.0 <= score_threshold <= 1.0:
        raise ValueError(f"score_threshold={score_threshold!r}: must be None or between -1 and 1")
