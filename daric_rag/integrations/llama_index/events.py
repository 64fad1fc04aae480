"""Document texts that any LlamaIndex retriever returns become known, so that prompts are recognised unchanged."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import MetadataMode
from llama_index_instrumentation import get_dispatcher

from daric_rag.known_documents import register_documents


class RetrievalWatcher(BaseEventHandler):
    """Registers the texts of retrieved and re-ranked nodes for recognition."""

    @classmethod
    def class_name(cls) -> str:
        return "DaricRetrievalWatcher"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        """Register the nodes of an event that carries some; other events are ignored."""
        if isinstance(event, RetrievalEndEvent | ReRankEndEvent):
            register_documents(node_texts(event.nodes))


_watcher = RetrievalWatcher()
_lock = threading.Lock()


def watch_retrieval(enabled: bool = True) -> None:
    """Start, or with False stop, listening to the retrievals of this process; twice does nothing."""
    handlers = get_dispatcher().event_handlers  # without a name: the root, which every event reaches
    with _lock:
        if enabled and _watcher not in handlers:
            handlers.append(_watcher)
        elif not enabled and _watcher in handlers:
            handlers.remove(_watcher)


def node_texts(nodes: Sequence[Any]) -> list[str]:
    """The forms in which nodes stand in prompts: as a synthesizer writes them, and the bare text."""
    texts: dict[str, None] = {}
    for node in nodes:
        for mode in (MetadataMode.LLM, MetadataMode.NONE):
            texts[node.get_content(metadata_mode=mode)] = None
    return [text for text in texts if text.strip()]
