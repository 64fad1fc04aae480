"""The public import path of the LangChain vector store and retriever."""

from daric_rag.integrations.langchain.store import (
    DaricLangChainRetriever,
    DaricVectorStore,
    EmbedderEmbeddings,
    LangChainEmbedder,
)

__all__ = ["DaricLangChainRetriever", "DaricVectorStore", "EmbedderEmbeddings", "LangChainEmbedder"]
