"""LangChain models over a `DaricEngine` (extra `langchain`): `ChatDaric`, `DaricLLM` and a chain for retrieval.

Swap the model object of an existing chain for one of these; documents that our retriever, vector store,
`DaricCallbackHandler` or `warm()` saw are found in the prompts and their KV is reused. The imports from vLLM come
with the first call.
"""

from __future__ import annotations

from daric_rag.errors import MissingExtraError

try:
    import langchain_core  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f'LangChain cannot be imported ({error}); install it with: pip install "daric-rag[langchain]"'
    ) from error

from daric_rag.integrations.langchain.chain import DaricCallbackHandler, create_daric_rag_chain
from daric_rag.integrations.langchain.chat import ChatDaric
from daric_rag.integrations.langchain.llm import DaricLLM

__all__ = ["ChatDaric", "DaricCallbackHandler", "DaricLLM", "create_daric_rag_chain"]
