"""LlamaIndex retriever over a `DocumentStore` (extras `llamaindex` and `retrieval`)."""

from typing import Any

import numpy as np
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from daric_rag.retrieval.document_store import DocumentStore, RetrievedDocument
from daric_rag.retrieval.embedder import Embeddings
from daric_rag.retrieval.filters import Filter
from daric_rag.retrieval.hooks import OnDocuments
from daric_rag.retrieval.retriever import DaricRetriever


class DaricLlamaIndexRetriever(BaseRetriever):
    """A `DocumentStore` as LlamaIndex retriever; nodes have the documents' ids.

    The arguments are those of `DaricRetriever`. A query bundle's own embedding is used if it has one.

        query_engine = RetrieverQueryEngine.from_args(DaricLlamaIndexRetriever(store, k=4), llm=llm)
    """

    def __init__(
        self,
        store: DocumentStore,
        k: int = 4,
        *,
        filter: Filter | None = None,
        score_threshold: float | None = None,
        on_documents: OnDocuments | None = None,
        callback_manager: CallbackManager | None = None,
        **options: Any,
    ) -> None:
        self._retriever = DaricRetriever(
            store, k, filter=filter, score_threshold=score_threshold, on_documents=on_documents
        )
        super().__init__(callback_manager=callback_manager, **options)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [_node(found) for found in self._retriever.retrieve(_query(query_bundle))]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [_node(found) for found in await self._retriever.aretrieve(_query(query_bundle))]


def _query(query_bundle: QueryBundle) -> str | Embeddings:
    if query_bundle.embedding is not None:
        return np.asarray(query_bundle.embedding, dtype=np.float32)
    return query_bundle.query_str


def _node(found: RetrievedDocument) -> NodeWithScore:
    node = TextNode(id_=found.id, text=found.text, metadata=found.metadata)
    return NodeWithScore(node=node, score=found.score)
