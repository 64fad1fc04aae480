"""Documents to prompts: embedder, document store and retriever (extra `retrieval`)."""

from daric_rag.retrieval.database import StoredDocument
from daric_rag.retrieval.document_store import DocumentStore, RetrievedDocument
from daric_rag.retrieval.embedder import Embedder, SentenceTransformerEmbedder
from daric_rag.retrieval.filters import Filter
from daric_rag.retrieval.hooks import OnDocuments
from daric_rag.retrieval.retriever import DaricRetriever
from daric_rag.retrieval.warming import BackgroundWarmer, warm_in_background

__all__ = [
    "BackgroundWarmer",
    "DaricRetriever",
    "DocumentStore",
    "Embedder",
    "Filter",
    "OnDocuments",
    "RetrievedDocument",
    "SentenceTransformerEmbedder",
    "StoredDocument",
    "warm_in_background",
]
