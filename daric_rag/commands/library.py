"""The searchable copy of a folder: a document store in the cache directory, brought up to date at every use."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from daric_rag.commands.documents import Document
from daric_rag.commands.engine_options import cache_directory
from daric_rag.retrieval import DocumentStore


def open_library(folder: Path, documents: Sequence[Document]) -> DocumentStore:
    """The store of a folder, holding these documents and no others; unchanged ones are not embedded again.

    Raises what `DocumentStore` raises.
    """
    store = DocumentStore(library_path(folder))
    try:
        synchronise(store, documents)
    except BaseException:
        store.close()
        raise
    return store


def library_path(folder: Path) -> Path:
    """Where a folder's store is kept."""
    name = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=12).hexdigest()
    return cache_directory() / "libraries" / name


def synchronise(store: DocumentStore, documents: Sequence[Document]) -> None:
    """Make the store hold exactly these documents."""
    wanted = {document.id for document in documents}
    store.delete([stored.id for stored in store.documents() if stored.id not in wanted])
    store.upsert(
        [document.text for document in documents],
        [{"file": document.file, "part": document.part} for document in documents],
        [document.id for document in documents],
    )
