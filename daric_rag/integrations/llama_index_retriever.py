"""The public import path of the LlamaIndex retriever."""

from daric_rag.integrations.llama_index.retriever import DaricLlamaIndexRetriever

__all__ = ["DaricLlamaIndexRetriever"]
