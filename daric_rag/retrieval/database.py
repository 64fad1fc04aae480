"""The SQLite file of a document store: documents, metadata and embeddings. It alone is the truth."""

import contextlib
import json
import os
import sqlite3
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from daric_rag.errors import CacheUnavailableError, DaricError, IndexMismatchError
from daric_rag.retrieval.embedder import Embeddings
from daric_rag.retrieval.filters import Metadata

FORMAT_VERSION = 1
BUSY_TIMEOUT_S = 30.0
# SQLite allows 999 parameters a statement on old builds.
PARAMETERS = 900

# AUTOINCREMENT: a key is never given twice, not even after its row was deleted. Text and ids are BLOBs
# because SQLite's TEXT cannot hold lone surrogates.
SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE documents (
    key INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL UNIQUE,
    text BLOB NOT NULL,
    metadata BLOB NOT NULL,
    embedding BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
"""
COLUMNS = "key, id, text, metadata, embedding, checksum"


@dataclass(frozen=True)
class StoredDocument:
    """A document as it is stored: its text, the user's id for it, and its JSON metadata."""

    id: str
    text: str
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One row: the document, its int64 key in the vector index, and its embedding as float32 bytes."""

    key: int
    document: StoredDocument
    embedding: bytes


class DocumentDatabase:
    """One connection to the SQLite file (or to memory, `path=None`); the owner serialises the calls.

    Raises `IndexMismatchError` naming the file if it is damaged or belongs to another embedder, and
    `CacheUnavailableError` if it cannot be opened. A refused file is not written to.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._name = str(path) if path is not None else "the in-memory database"
        if path is not None and path.exists():
            with self._errors(opening=True):
                self._open_existing(path)

    @property
    def exists(self) -> bool:
        """Whether there is a database to read; a new one is made by `create`."""
        return self._connection is not None

    def create(self, embedder: str, dim: int) -> None:
        """Make the empty database for embedder `embedder` with vectors of length `dim`."""
        with self._errors(opening=True):
            if self.path is None:
                self._connection = _connect(":memory:")
                _initialise(self._connection, embedder, dim)
            else:
                _create_file(self.path, embedder, dim)
                self._open_existing(self.path)

    def close(self) -> None:
        """Close the connection; the file is complete without it."""
        if self._connection is not None:
            self._connection.close()

    @property
    def store_uuid(self) -> bytes:
        """Sixteen random bytes given when the database was made."""
        return uuid.UUID(self.meta("uuid")).bytes

    @property
    def generation(self) -> int:
        """Number of committed changes; grows with every write of any process."""
        return int(self.meta("generation"))

    def meta(self, name: str) -> Any:
        """A value of the `meta` table."""
        with self._errors():
            row = self._sql("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise self._damaged(f"its entry {name!r} is missing")
        return row[0]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """All reads inside see one state, whatever other processes commit meanwhile."""
        with self._errors():
            self._sql("BEGIN")
            try:
                yield
            finally:
                self._sql("ROLLBACK")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Commit everything done inside, or nothing; the generation grows by one."""
        with self._errors():
            self._sql("BEGIN IMMEDIATE")
            try:
                yield
                self._sql("UPDATE meta SET value = value + 1 WHERE name = 'generation'")
                self._sql("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._sql("ROLLBACK")
                raise

    def insert(self, document: StoredDocument, embedding: Embeddings) -> int:
        """Store a document (inside `writing`) and return its new key."""
        blob = embedding.astype("<f4", copy=False).tobytes()
        values = (_to_blob(document.id), _to_blob(document.text), to_json(document.metadata).encode(), blob)
        cursor = self._sql(
            "INSERT INTO documents (id, text, metadata, embedding, checksum) VALUES (?, ?, ?, ?, ?)",
            (*values, _checksum(values)),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def remove(self, keys: Sequence[int]) -> None:
        """Delete rows by key (inside `writing`)."""
        for part, marks in _parts(keys):
            self._sql(f"DELETE FROM documents WHERE key IN ({marks})", part)

    def rows_by_id(self, ids: Iterable[str]) -> dict[str, Row]:
        """The rows that exist among `ids`."""
        blobs = [_to_blob(id) for id in ids]
        rows = self._select_in("id", blobs)
        return {row.document.id: row for row in rows}

    def rows_by_key(self, keys: Sequence[int]) -> dict[int, Row]:
        """The rows that exist among `keys`."""
        return {row.key: row for row in self._select_in("key", keys)}

    def keys_by_id(self, ids: Iterable[str]) -> dict[str, int]:
        """The keys of the documents that exist among `ids`."""
        found: dict[str, int] = {}
        with self._errors():
            for part, marks in _parts([_to_blob(id) for id in ids]):
                for id, key in self._sql(f"SELECT id, key FROM documents WHERE id IN ({marks})", part):
                    found[_to_text(id)] = key
        return found

    def rows(self, after: int, limit: int) -> list[Row]:
        """The first `limit` rows with a key above `after`, in key order."""
        with self._errors():
            query = f"SELECT {COLUMNS} FROM documents WHERE key > ? ORDER BY key LIMIT ?"
            return [self._row(values) for values in self._sql(query, (after, limit))]

    def metadata(self) -> Iterator[tuple[int, Metadata]]:
        """Key and metadata of every document."""
        with self._errors():
            for key, text in self._sql("SELECT key, metadata FROM documents"):
                try:
                    yield key, json.loads(text)
                except ValueError as error:
                    raise self._damaged(f"the metadata of row {key} is not JSON") from error

    def count(self) -> int:
        """Number of documents."""
        with self._errors():
            return int(self._sql("SELECT count(*) FROM documents").fetchone()[0])

    def copy_to(self, path: Path) -> None:
        """Write a consistent copy to the new file `path`, with an identity of its own."""
        assert self._connection is not None
        temporary = _temporary(path)
        with self._errors(), contextlib.closing(_connect(str(temporary))) as target:
            self._connection.backup(target)
            target.execute("UPDATE meta SET value = ? WHERE name = 'uuid'", (str(uuid.uuid4()),))
        publish_new(temporary, path)

    def _select_in(self, column: str, values: Sequence[Any]) -> list[Row]:
        rows = []
        with self._errors():
            for part, marks in _parts(values):
                query = f"SELECT {COLUMNS} FROM documents WHERE {column} IN ({marks})"
                rows += [self._row(found) for found in self._sql(query, part)]
        return rows

    def _row(self, values: tuple[Any, ...]) -> Row:
        key, *stored, checksum = values
        if not all(isinstance(value, bytes) for value in stored) or _checksum(stored) != checksum:
            raise self._damaged(f"the checksum of row {key} is wrong")
        id, text, metadata, embedding = stored
        document = StoredDocument(_to_text(id), _to_text(text), json.loads(metadata))
        return Row(key, document, embedding)

    def _open_existing(self, path: Path) -> None:
        # Read-only, so that a damaged file is not even written to by SQLite's own recovery.
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            self._check(connection)
        self._connection = _connect(str(path))

    def _check(self, connection: sqlite3.Connection) -> None:
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise self._damaged(str(problem))
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if not {"meta", "documents"} <= tables:
            raise self._damaged(
                "it has no documents table"
            )  # an empty file is a valid database without tables
        (version,) = connection.execute("SELECT value FROM meta WHERE name = 'format'").fetchone() or (None,)
        if version != FORMAT_VERSION:
            raise IndexMismatchError(
                f"{self._name} has format {version}, this version reads {FORMAT_VERSION}"
            )

    def _sql(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        assert self._connection is not None
        return self._connection.execute(statement, values)

    def _damaged(self, how: str) -> IndexMismatchError:
        return IndexMismatchError(
            f"{self._name} is damaged: {how}. Nothing was changed; "
            "restore the file, or delete its directory and index the documents again"
        )

    @contextlib.contextmanager
    def _errors(self, opening: bool = False) -> Iterator[None]:
        """SQLite's exceptions as ours, naming the file."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise self._damaged(str(error)) from error
            kind = CacheUnavailableError if opening else DaricError
            raise kind(f"{self._name}: {error}") from error


def to_json(metadata: Metadata) -> str:
    """Metadata as ASCII JSON; `ValueError` naming the field that JSON cannot hold."""
    for name, value in metadata.items():
        if not isinstance(name, str):
            raise ValueError(f"metadata field {name!r}: names must be str")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"metadata field {name!r}: {value!r} is not JSON ({error}); allowed are str, int, float, "
                "bool, None, and lists and dictionaries of them"
            ) from error
    return json.dumps(metadata)


def publish_new(temporary: Path, path: Path) -> None:
    """Give a finished file its name; if another process was faster, its file stays."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(temporary, path)
        return
    temporary.unlink()


def _create_file(path: Path, embedder: str, dim: int) -> None:
    # Made under another name, so that a crash never leaves half a schema under the real one.
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_connect(str(temporary))) as connection:
            _initialise(connection, embedder, dim)
        publish_new(temporary, path)
    except OSError as error:
        raise CacheUnavailableError(f"{path.parent} cannot hold a document store: {error}") from error


def _initialise(connection: sqlite3.Connection, embedder: str, dim: int) -> None:
    connection.executescript(SCHEMA)
    meta = {
        "format": FORMAT_VERSION,
        "embedder": embedder,
        "dim": dim,
        "generation": 0,
        "uuid": str(uuid.uuid4()),
    }
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    # Last, because everything before it then is in the main file when the connection closes.
    connection.execute("PRAGMA journal_mode = WAL")


def _connect(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")


def _parts(values: Sequence[Any]) -> Iterator[tuple[Sequence[Any], str]]:
    for start in range(0, len(values), PARAMETERS):
        part = values[start : start + PARAMETERS]
        yield part, ", ".join("?" * len(part))


def _checksum(values: Sequence[bytes]) -> int:
    checksum = 0
    for value in values:  # with the lengths, so that bytes cannot move from one column to the next
        checksum = zlib.crc32(value, zlib.crc32(struct.pack("<q", len(value)), checksum))
    return checksum


def _to_blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _to_text(blob: bytes) -> str:
    return blob.decode("utf-8", "surrogatepass")


def to_vectors(rows: Sequence[Row], dim: int) -> Embeddings:
    """The embeddings of rows, float32 [len(rows), dim]."""
    data = b"".join(row.embedding for row in rows)
    if len(data) != len(rows) * dim * 4:
        raise IndexMismatchError(f"stored embeddings are not float32 [{dim}]; the document store is damaged")
    return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(len(rows), dim)
