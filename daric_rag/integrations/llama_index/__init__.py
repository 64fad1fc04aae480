"""LlamaIndex language model on `DaricEngine` (extra `llamaindex`): swap the LLM, change nothing else."""

from daric_rag.errors import MissingExtraError

try:
    import llama_index.core  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f'LlamaIndex cannot be imported ({error}); install it with: pip install "daric-rag[llamaindex]"'
    ) from error

from daric_rag.integrations.llama_index.events import watch_retrieval
from daric_rag.integrations.llama_index.llm import DaricLLM
from daric_rag.integrations.llama_index.prompt_helper import DaricPromptHelper

__all__ = ["DaricLLM", "DaricPromptHelper", "watch_retrieval"]
