"""daric_rag: retrieval-augmented generation on vLLM that reuses each document's KV at any position."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daric_rag.config import DaricConfig
    from daric_rag.engine.engine import DaricEngine
    from daric_rag.engine.metrics import RequestMetrics
    from daric_rag.engine.result import GenerationResult, StreamChunk, WarmResult
    from daric_rag.engine.selection import register_strategy
    from daric_rag.errors import DaricError
    from daric_rag.prompt import ChatMessage, ChatPrompt, ChunkedPrompt, Document, Live

__version__ = "0.1.0"

# Imported on first use, so that `import daric_rag` loads neither vLLM nor torch.
_HOMES = {
    "ChatMessage": "daric_rag.prompt",
    "ChatPrompt": "daric_rag.prompt",
    "ChunkedPrompt": "daric_rag.prompt",
    "DaricConfig": "daric_rag.config",
    "DaricEngine": "daric_rag.engine.engine",
    "DaricError": "daric_rag.errors",
    "Document": "daric_rag.prompt",
    "GenerationResult": "daric_rag.engine.result",
    "Live": "daric_rag.prompt",
    "RequestMetrics": "daric_rag.engine.metrics",
    "StreamChunk": "daric_rag.engine.result",
    "WarmResult": "daric_rag.engine.result",
    "register_strategy": "daric_rag.engine.selection",
}

__all__ = [
    "ChatMessage",
    "ChatPrompt",
    "ChunkedPrompt",
    "DaricConfig",
    "DaricEngine",
    "DaricError",
    "Document",
    "GenerationResult",
    "Live",
    "RequestMetrics",
    "StreamChunk",
    "WarmResult",
    "__version__",
    "register_strategy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'daric_rag' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
