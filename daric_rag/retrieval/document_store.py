"""The document store: SQLite holds the documents and their embeddings, FAISS searches them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from daric_rag.errors import CacheUnavailableError, IndexMismatchError
from daric_rag.retrieval.database import Row, StoredDocument, to_vectors
from daric_rag.retrieval.embedder import Embedder, Embeddings, SentenceTransformerEmbedder, normalised
from daric_rag.retrieval.filters import Filter, Metadata, compile_filter
from daric_rag.retrieval.hooks import OnDocuments, notify
from daric_rag.retrieval.indexed_database import DATABASE_FILE, IndexedDatabase, refuse_existing
from daric_rag.retrieval.ingest import embed, prepare, progress_bar

# Documents embedded and committed together: an interrupted `add` loses at most this much work.
COMMIT_BLOCK = 1024


@dataclass(frozen=True)
class RetrievedDocument:
    """A document found by a search; `score` is the cosine similarity with the query, in [-1, 1]."""

    id: str
    text: str
    metadata: Metadata
    score: float


class DocumentStore:
    """Documents under string ids, searchable by meaning, in a directory or (`path=None`) in memory.

    Every change is committed to SQLite before the call returns; the FAISS file is a copy that is rebuilt
    when it is missing, stale or damaged. Safe to call from several threads, and several processes may share
    a directory. `on_documents` is called with the texts of every block added (also of unchanged documents).

        with DocumentStore("index") as store:
            store.upsert(["Paris is in France.", "Rome is in Italy."], ids=["paris", "rome"])
            store.search("Where is Paris?", k=1)[0].id    # "paris"

    Raises `IndexMismatchError` if the directory was built with another embedder or its database is damaged
    (nothing is overwritten), `CacheUnavailableError` if it cannot be used, and `MissingExtraError` without
    the extra `retrieval`.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        embedder: Embedder | None = None,
        *,
        on_documents: OnDocuments | None = None,
        progress: bool | None = None,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.embedder: Embedder = SentenceTransformerEmbedder() if embedder is None else embedder
        self.on_documents = on_documents
        self._progress = progress
        self._database = IndexedDatabase(self.path)
        if not self._database.exists:
            self._database.create(self.embedder.name, self.embedder.dim)
        self._refuse_other_embedder()

    @classmethod
    def load(cls, path: str | Path, embedder: Embedder | None = None, **options: Any) -> "DocumentStore":
        """Open an existing store; `ValueError` if there is none in the directory `path`."""
        if not (Path(path) / DATABASE_FILE).exists():
            raise ValueError(f"path={str(path)!r}: no document store there (no file {DATABASE_FILE})")
        return cls(path, embedder, **options)

    def add(
        self,
        texts: Sequence[str],
        metadatas: Sequence[Metadata | None] | None = None,
        ids: Sequence[str | None] | None = None,
    ) -> list[str]:
        """Store new documents and return their ids; missing ids are made up.

        Raises `ValueError`, with nothing stored, if an id exists already or comes twice. Metadata is stored
        as JSON. Documents are committed in blocks of 1,024.
        """
        documents = prepare(texts, metadatas, ids)
        given = [document.id for document in documents]
        if repeated := [id for id, count in Counter(given).items() if count > 1]:
            raise ValueError(f"ids contains {repeated[0]!r} twice; an id names one document")
        # A second time in the transaction; this time, before hours of embedding.
        refuse_existing(self._database.rows_by_id(given))
        self._store(documents, replace=False)
        return given

    def upsert(
        self,
        texts: Sequence[str],
        metadatas: Sequence[Metadata | None] | None = None,
        ids: Sequence[str | None] | None = None,
    ) -> list[str]:
        """Store documents, replacing those with the same id, and return the ids.

        A document whose text is unchanged is not embedded again. If an id comes twice, the last one stays.
        """
        documents = prepare(texts, metadatas, ids)
        self._store(list({document.id: document for document in documents}.values()), replace=True)
        return [document.id for document in documents]

    def delete(self, ids: Sequence[str]) -> int:
        """Remove documents and return how many there were; unknown ids are ignored."""
        if isinstance(ids, str):
            raise ValueError(f"ids={ids!r}: must be a sequence of str, not one str")
        return self._database.change(ids, [], None)

    def clear(self) -> int:
        """Remove all documents and return how many there were."""
        return self.delete([document.id for document in self.documents()])

    def get(self, ids: Sequence[str]) -> list[StoredDocument]:
        """The documents with these ids, in this order; unknown ids are left out."""
        found = self._database.rows_by_id(ids)
        return [found[id].document for id in ids if id in found]

    def documents(self) -> Iterator[StoredDocument]:
        """All documents, oldest first; changes made while iterating may or may not be seen."""
        for rows in self._database.blocks():
            yield from (row.document for row in rows)

    def vectors(self, ids: Sequence[str]) -> Embeddings:
        """The embeddings of these documents, float32 [len(ids), dim]; `ValueError` for an unknown id."""
        found = self._database.rows_by_id(ids)
        if missing := [id for id in ids if id not in found]:
            raise ValueError(f"ids: {missing[0]!r} is not in the store")
        return to_vectors([found[id] for id in ids], self._database.dim)

    def search(
        self, query: str | Embeddings, k: int = 4, filter: Filter | None = None
    ) -> list[RetrievedDocument]:
        """The `k` documents nearest to a query, best first; fewer only if fewer exist or pass the filter.

        `query` is a text or its embedding, float32 [dim]. For `filter` see `compile_filter`.
        """
        check_k(k)
        predicate = compile_filter(filter)
        if len(self) == 0:
            return []
        vector = self.embedder.encode_query(query) if isinstance(query, str) else query
        vector = normalised([vector], 1, self._database.dim, self.embedder.name)[0]
        return [
            RetrievedDocument(row.document.id, row.document.text, row.document.metadata, score)
            for row, score in self._database.search(vector, k, predicate)
        ]

    def __len__(self) -> int:
        return self._database.count()

    def save(self, path: str | Path | None = None) -> None:
        """Write the FAISS file, so that the next start need not; with `path`, copy the store there.

        Documents are in SQLite already. Raises `ValueError` if `path` holds a store, or if a store in memory
        is saved without a `path`.
        """
        if path is None:
            if self.path is None:
                raise ValueError("path=None: a document store in memory needs a directory to be saved to")
            self._database.write_vectors()
            return
        target = Path(path)
        if (target / DATABASE_FILE).exists():
            raise ValueError(f"path={str(path)!r}: there is a document store already")
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CacheUnavailableError(f"{target} cannot hold a document store: {error}") from error
        self._database.copy_to(target)
        with DocumentStore(target, self.embedder) as copy:
            copy.save()

    def close(self) -> None:
        """Write the FAISS file if it is out of date, and let go of the files; may be called again."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _store(self, documents: list[StoredDocument], replace: bool) -> None:
        with progress_bar(len(documents), self._progress) as bar:
            for start in range(0, len(documents), COMMIT_BLOCK):
                block = documents[start : start + COMMIT_BLOCK]
                self._store_block(block, replace, bar)
                notify(self.on_documents, [document.text for document in block])

    def _store_block(self, block: list[StoredDocument], replace: bool, bar: Any) -> None:
        known = self._database.rows_by_id([document.id for document in block]) if replace else {}
        unchanged = {document.id for document in block if _is_same(known.get(document.id), document)}
        changed = [document for document in block if document.id not in unchanged]
        bar.update(len(unchanged))
        if changed:
            vectors = self._vectors_of(changed, known, bar)
            self._database.change([document.id for document in changed], changed, vectors, replace)

    def _vectors_of(self, documents: list[StoredDocument], known: dict[str, Row], bar: Any) -> Embeddings:
        """Embeddings of documents; a text that is stored under the same id already is not embedded again.

        No lock is held: embedding takes long, and searches go on meanwhile.
        """
        vectors = np.empty((len(documents), self._database.dim), dtype=np.float32)
        new = []
        for position, document in enumerate(documents):
            row = known.get(document.id)
            if row is not None and row.document.text == document.text:
                vectors[position] = to_vectors([row], self._database.dim)
                bar.update(1)
            else:
                new.append(position)
        vectors[new] = embed(
            self.embedder, [documents[position].text for position in new], self._database.dim, bar
        )
        return vectors

    def _refuse_other_embedder(self) -> None:
        stored = self._database.embedder
        if stored != self.embedder.name:
            self._database.close()
            raise IndexMismatchError(
                f"{self.path} was built with the embedder {stored!r} and cannot be used with "
                f"{self.embedder.name!r}; open it with {stored!r}, or index into another directory"
            )


def check_k(k: int) -> None:
    """Raise `ValueError` unless `k` is an int of at least 1."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r}: must be an int of at least 1")


def _is_same(row: Row | None, document: StoredDocument) -> bool:
    return row is not None and row.document == document
