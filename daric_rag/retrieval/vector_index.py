"""The vector index of a document store: FAISS in memory, and its copy on disk."""

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from daric_rag.retrieval.embedder import Embeddings
from daric_rag.retrieval.optional import require

logger = logging.getLogger(__name__)

# Header of the file: magic, identity of the database, its generation, length and digest of what follows.
HEADER = struct.Struct("<8s16sQQ16s")
MAGIC = b"DARICVX1"


class VectorIndex:
    """Exact inner-product search over float32 vectors of length `dim`, each under an int64 key.

    Needs FAISS: raises `MissingExtraError` if it is missing. Not safe for concurrent calls.
    """

    def __init__(self, dim: int) -> None:
        self._faiss = require("faiss", "retrieval")
        self.dim = dim
        self._index = self._faiss.IndexIDMap2(self._faiss.IndexFlatIP(dim))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def add(self, keys: Sequence[int], vectors: Embeddings) -> None:
        """Add vectors, float32 [len(keys), dim]."""
        if len(keys):
            self._index.add_with_ids(np.ascontiguousarray(vectors), np.asarray(keys, dtype=np.int64))

    def remove(self, keys: Sequence[int]) -> None:
        """Remove the vectors of `keys`; absent keys are ignored."""
        if len(keys):
            self._index.remove_ids(np.asarray(keys, dtype=np.int64))

    def search(self, query: Embeddings, k: int, keys: Sequence[int] | None = None) -> list[tuple[int, float]]:
        """The `k` best (key, inner product), best first, among `keys` only if given; or as many as there are.

        `query`: float32 [dim].
        """
        k = min(k, len(self) if keys is None else len(keys))
        if k == 0:
            return []
        parameters = None
        if keys is not None:
            selector = self._faiss.IDSelectorBatch(np.asarray(keys, dtype=np.int64))
            parameters = self._faiss.SearchParameters(sel=selector)
        scores, found = self._index.search(query.reshape(1, -1), k, params=parameters)
        # FAISS fills up missing hits with key -1.
        return [(int(key), float(s)) for key, s in zip(found[0], scores[0], strict=True) if key != -1]

    def write(self, path: Path, store_uuid: bytes, generation: int) -> None:
        """Replace the file `path` by this index, atomically; raises `OSError`."""
        payload = self._faiss.serialize_index(self._index)
        header = HEADER.pack(MAGIC, store_uuid, generation, len(payload), _digest(payload))
        # One temporary name: what a crash leaves behind is overwritten by the next writer. Should two write
        # at once, the digest gives the mixture away.
        temporary = path.with_name(path.name + ".tmp")
        with open(temporary, "wb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)

    @staticmethod
    def is_current(path: Path, store_uuid: bytes, generation: int) -> bool:
        """Whether the file `path` claims to hold this state (its payload is not read)."""
        try:
            with open(path, "rb") as file:
                return _read_header(file, store_uuid, generation) is not None
        except OSError:
            return False

    @classmethod
    def read(cls, path: Path, dim: int, store_uuid: bytes, generation: int) -> "VectorIndex | None":
        """The index in the file `path`, or `None` if it is missing, damaged, stale or another store's."""
        try:
            with open(path, "rb") as file:
                digest = _read_header(file, store_uuid, generation)
                payload = file.read() if digest is not None else b""
        except OSError:
            return None
        if digest is None:
            return None
        if _digest(payload) != digest:
            logger.warning("%s is damaged and is rebuilt from the documents", path)
            with contextlib.suppress(OSError):  # or its intact header would keep it from being replaced
                path.unlink()
            return None
        index = cls(dim)
        loaded = index._faiss.deserialize_index(np.frombuffer(payload, dtype=np.uint8))
        if not _is_alike(loaded, index._index):
            return None
        index._index = loaded
        return index


def _read_header(file: BinaryIO, store_uuid: bytes, generation: int) -> bytes | None:
    """The payload's digest, or `None` if the file does not hold this state of this store."""
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    magic, owner, written, length, digest = HEADER.unpack(header)
    size = os.fstat(file.fileno()).st_size - HEADER.size
    if (magic, owner, written, length) != (MAGIC, store_uuid, generation, size):
        return None
    return bytes(digest)


def _is_alike(loaded: Any, expected: Any) -> bool:
    kind = (type(loaded), loaded.d, loaded.metric_type)
    return kind == (type(expected), expected.d, expected.metric_type)


def _digest(payload: Any) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _sync_directory(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a directory be synced
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
