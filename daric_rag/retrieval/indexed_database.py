"""SQLite and FAISS kept in step: every change goes to both, every search sees one state of both."""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from daric_rag.errors import DaricError
from daric_rag.one_process import OneProcess
from daric_rag.retrieval.database import DocumentDatabase, Row, StoredDocument, to_vectors
from daric_rag.retrieval.embedder import Embeddings
from daric_rag.retrieval.filters import Predicate
from daric_rag.retrieval.vector_index import VectorIndex

logger = logging.getLogger(__name__)

DATABASE_FILE = "documents.sqlite"
VECTORS_FILE = "vectors.faiss"
READ_BLOCK = 1024  # rows read at once
# A filtered search looks at this many times k candidates before it evaluates the filter on all documents.
OVER_FETCH = 8
STALE = -1


class IndexedDatabase(OneProcess):
    """The documents in the directory `path` (in memory: `None`) and the index over their vectors.

    A database that does not exist yet is made by `create`; until then nothing else may be called. Safe to
    call from several threads. Another process may change the directory: the index is then read again; a forked one
    cannot use this object.
    """

    kind = "document store"

    def __init__(self, path: Path | None) -> None:
        self.check_process()
        self.path = path
        self._lock = threading.RLock()
        self._closed = False
        self._index: VectorIndex | None = None
        self._index_generation = STALE
        self._database = DocumentDatabase(None if path is None else path / DATABASE_FILE)
        self._dim = int(self._database.meta("dim")) if self._database.exists else 0

    @property
    def exists(self) -> bool:
        """Whether there is a database to read."""
        return self._database.exists

    def create(self, embedder: str, dim: int) -> None:
        """Make the empty database for vectors of length `dim` made by `embedder`."""
        self._database.create(embedder, dim)
        self._dim = int(self._database.meta("dim"))

    @property
    def embedder(self) -> str:
        """Name of the embedder that made the vectors."""
        return str(self._database.meta("embedder"))

    @property
    def dim(self) -> int:
        """Length of a vector."""
        return self._dim

    def count(self) -> int:
        """Number of documents."""
        with self._open() as database:
            return database.count()

    def rows_by_id(self, ids: Sequence[str]) -> dict[str, Row]:
        """The rows that exist among `ids`."""
        with self._open() as database:
            return database.rows_by_id(ids)

    def blocks(self) -> Iterator[list[Row]]:
        """All rows in lists, oldest first; changes made while iterating may or may not be seen."""
        last = 0
        while True:
            with self._open() as database:
                rows = database.rows(after=last, limit=READ_BLOCK)
            if not rows:
                return
            yield rows
            last = rows[-1].key

    def change(
        self,
        removed: Sequence[str],
        inserted: Sequence[StoredDocument],
        vectors: Embeddings | None,
        replace: bool = True,
    ) -> int:
        """Remove and insert in one transaction, first in SQLite, then in FAISS; how many were removed."""
        with self._open() as database:
            with database.writing():
                index = self._current_index()
                generation = database.generation + 1
                old = database.keys_by_id(removed)
                if not replace:
                    refuse_existing(old)
                database.remove(list(old.values()))
                keys = [] if vectors is None else list(map(database.insert, inserted, vectors))
            self._index_generation = STALE  # until both steps are done
            index.remove(list(old.values()))
            if vectors is not None:
                index.add(keys, vectors)
            self._index_generation = generation
        return len(old)

    def search(self, vector: Embeddings, k: int, predicate: Predicate | None) -> list[tuple[Row, float]]:
        """The `k` best rows and their inner products with `vector` (float32 [dim]), best first."""
        with self._open() as database, database.reading():
            return self._hits(vector, k, predicate)

    def copy_to(self, directory: Path) -> None:
        """Write a copy of the database into `directory`, which must exist and hold none."""
        with self._open() as database:
            database.copy_to(directory / DATABASE_FILE)

    def write_vectors(self) -> None:
        """Write the FAISS file if it is out of date; a failure is only logged."""
        assert self.path is not None
        path = self.path / VECTORS_FILE
        with self._open() as database, database.reading():
            identity = (database.store_uuid, database.generation)
            if VectorIndex.is_current(path, *identity):
                return
            try:
                self._current_index().write(path, *identity)
            except OSError as error:
                logger.warning("%s was not written (%s); it will be rebuilt from the documents", path, error)

    def close(self) -> None:
        """Write the FAISS file if it is out of date, and let go of the files; may be called again.

        In a forked process it does nothing: the files are its parent's.
        """
        if self.is_elsewhere:
            return
        with self._lock:
            if self._closed:
                return
            try:
                if self.path is not None and self._index is not None:
                    self.write_vectors()
            finally:
                self._closed = True
                self._database.close()
                self._index = None

    def _hits(self, vector: Embeddings, k: int, predicate: Predicate | None) -> list[tuple[Row, float]]:
        index = self._current_index()
        if predicate is None:
            return self._rows(index.search(vector, k))
        candidates = self._rows(index.search(vector, max(k * OVER_FETCH, 64)))
        hits = [(row, score) for row, score in candidates if predicate(row.document.metadata)]
        if len(hits) < k and len(candidates) < len(index):
            # Few documents pass the filter: find them first, and search among them only.
            keys = [key for key, metadata in self._database.metadata() if predicate(metadata)]
            hits = self._rows(index.search(vector, k, keys))
        return hits[:k]

    def _rows(self, found: list[tuple[int, float]]) -> list[tuple[Row, float]]:
        rows = self._database.rows_by_key([key for key, _ in found])
        return [(rows[key], min(1.0, max(-1.0, score))) for key, score in found if key in rows]

    def _current_index(self) -> VectorIndex:
        """The index of the state that the open transaction sees; another process may have changed it."""
        generation = self._database.generation
        if self._index is None or self._index_generation != generation:
            self._index = self._load_index(generation)
            self._index_generation = generation
        return self._index

    def _load_index(self, generation: int) -> VectorIndex:
        database = self._database
        if self.path is not None:
            stored = VectorIndex.read(self.path / VECTORS_FILE, self._dim, database.store_uuid, generation)
            if stored is not None and len(stored) == database.count():
                return stored
        index = VectorIndex(self._dim)
        for rows in self.blocks():
            index.add([row.key for row in rows], to_vectors(rows, self._dim))
        return index

    @contextlib.contextmanager
    def _open(self) -> Iterator[DocumentDatabase]:
        """The database, for this thread alone."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise DaricError("the document store is closed")
            yield self._database


def refuse_existing(found: Iterable[str]) -> None:
    """Raise `ValueError` naming the first of the ids that exist already."""
    for id in found:
        raise ValueError(f"ids: {id!r} is in the store already; upsert() replaces documents")
