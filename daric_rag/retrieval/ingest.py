"""What happens to documents before they are stored: validation, ids, embedding in batches."""

import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from daric_rag.retrieval.database import StoredDocument, to_json
from daric_rag.retrieval.embedder import Embedder, Embeddings, batches_by_length, normalised
from daric_rag.retrieval.filters import Metadata
from daric_rag.retrieval.optional import require

EMBEDDING_BATCH = 64
PROGRESS_FROM = 256  # documents; fewer are embedded in a moment


def prepare(
    texts: Sequence[str], metadatas: Sequence[Metadata | None] | None, ids: Sequence[str | None] | None
) -> list[StoredDocument]:
    """Documents from parallel sequences; a missing id becomes a random one.

    Raises `ValueError` naming the argument for a length, a type, or metadata that JSON cannot hold.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts={texts[:40]!r}: must be a sequence of str, not one str")
    for name, values in (("metadatas", metadatas), ("ids", ids)):
        if values is not None and len(values) != len(texts):
            raise ValueError(
                f"{name} has {len(values)} entries for {len(texts)} texts; the numbers must match"
            )
    documents = []
    for position, text in enumerate(texts):
        id = ids[position] if ids is not None else None
        metadata = (metadatas[position] if metadatas is not None else None) or {}
        _check(position, text, id, metadata)
        documents.append(StoredDocument(uuid.uuid4().hex if id is None else id, text, dict(metadata)))
    return documents


def embed(embedder: Embedder, texts: Sequence[str], dim: int, bar: Any) -> Embeddings:
    """Vectors of `texts`, float32 [len(texts), dim], in batches of similar length; `bar` counts them."""
    vectors = np.empty((len(texts), dim), dtype=np.float32)
    for positions in batches_by_length(texts, EMBEDDING_BATCH):
        batch = embedder.encode_documents([texts[position] for position in positions])
        vectors[positions] = normalised(batch, len(positions), dim, embedder.name)
        bar.update(len(positions))
    return vectors


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Any]:
    """A bar on stderr; by default (`None`) only on a terminal and for many documents."""
    tqdm = require("tqdm", "retrieval").tqdm

    wanted = (sys.stderr.isatty() and total >= PROGRESS_FROM) if show is None else show
    with tqdm(total=total, desc="Indexing", unit="doc", file=sys.stderr, disable=not wanted) as bar:
        yield bar


def _check(position: int, text: Any, id: Any, metadata: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"texts[{position}] is {type(text).__name__}, must be str")
    if id is not None and not isinstance(id, str):
        raise ValueError(f"ids[{position}]={id!r}: must be str or None")
    if not isinstance(metadata, dict):
        raise ValueError(f"metadatas[{position}] is {type(metadata).__name__}, must be a dictionary or None")
    to_json(metadata)
