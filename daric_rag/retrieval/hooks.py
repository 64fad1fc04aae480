"""Telling others which document texts were indexed or retrieved."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from daric_rag.known_documents import register_documents

logger = logging.getLogger(__name__)

OnDocuments: TypeAlias = Callable[[Sequence[str]], None]


def notify(hook: OnDocuments | None, texts: Sequence[str]) -> None:
    """Let this process's engines recognise the texts, and call the hook.

    An error of the hook is logged, because the documents are stored or found all the same.
    """
    if not texts:
        return
    register_documents(texts)
    if hook is None:
        return
    try:
        hook(texts)
    except Exception:
        logger.exception("on_documents hook %r failed for %d documents", hook, len(texts))


def both(first: OnDocuments | None, second: OnDocuments) -> OnDocuments:
    """One hook that calls two."""
    if first is None:
        return second

    def call(texts: Sequence[str]) -> None:
        notify(first, texts)
        notify(second, texts)

    return call
