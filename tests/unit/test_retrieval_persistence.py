"""What is on disk: crashes, damage, other embedders, other processes' changes, a dictionary as model."""

import shutil
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from daric_rag.errors import CacheUnavailableError, IndexMismatchError
from daric_rag.retrieval import DocumentStore, SentenceTransformerEmbedder, vector_index
from tests.unit.retrieval_support import WordEmbedder

TEXTS = [f"text number {n}" for n in range(40)]
IDS = [str(n) for n in range(40)]


def build(path: Path, texts: list[str] = TEXTS) -> Path:
    """A closed store of `texts` in `path`; its database file."""
    with DocumentStore(path, WordEmbedder()) as store:
        store.add(texts, [{"n": n} for n in range(40)], IDS)
    return path / "documents.sqlite"


def answers(store: DocumentStore) -> list[str]:
    return [store.search(text, k=1)[0].id for text in TEXTS]


def test_reopened_store_answers_the_same(tmp_path: Path) -> None:
    build(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["documents.sqlite", "vectors.faiss"]
    with DocumentStore.load(tmp_path, WordEmbedder()) as store:
        assert answers(store) == IDS
        assert store.get(["7"])[0].metadata == {"n": 7}


def test_valid_vector_file_is_used_and_not_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path)
    written = (tmp_path / "vectors.faiss").stat().st_mtime_ns

    def refuse(*arguments: object) -> None:
        raise AssertionError("rebuilt")

    with DocumentStore(tmp_path, WordEmbedder()) as store:
        monkeypatch.setattr(vector_index.VectorIndex, "add", refuse)
        assert answers(store) == IDS
    assert (tmp_path / "vectors.faiss").stat().st_mtime_ns == written


def test_work_before_a_crash_is_kept(tmp_path: Path) -> None:
    store = DocumentStore(tmp_path / "running", WordEmbedder())
    store.add(TEXTS, ids=IDS)
    # The files as a crash would leave them: with a write-ahead log, without vectors.
    shutil.copytree(tmp_path / "running", tmp_path / "crashed")
    with DocumentStore(tmp_path / "crashed", WordEmbedder()) as recovered:
        assert answers(recovered) == IDS
    store.close()


@pytest.mark.parametrize(
    "damage", ["missing", "empty", "header", "payload", "short", "long", "stale", "other"]
)
def test_vector_file_is_rebuilt(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "store")
    vectors = tmp_path / "store" / "vectors.faiss"
    data = bytearray(vectors.read_bytes())
    if damage == "missing":
        vectors.unlink()
    elif damage == "other":
        build(tmp_path / "other", TEXTS[::-1])
        shutil.copy(tmp_path / "other" / "vectors.faiss", vectors)
    elif damage == "stale":
        with DocumentStore(tmp_path / "store", WordEmbedder()) as store:
            store.delete(["0"])
            store.add([TEXTS[0]], ids=["0"])
        vectors.write_bytes(data)
    else:
        data[3 if damage == "header" else 1500] ^= 1
        vectors.write_bytes({"empty": b"", "short": data[:-1], "long": data + b"x"}.get(damage, data))
    with DocumentStore(tmp_path / "store", WordEmbedder()) as store:
        assert answers(store) == IDS
    with DocumentStore(tmp_path / "store", WordEmbedder()) as store:
        monkeypatch.setattr(vector_index.VectorIndex, "add", None)  # nothing is left to rebuild
        assert answers(store) == IDS


def test_unwritable_vector_file_costs_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with DocumentStore(tmp_path, WordEmbedder()) as store:
        store.add(TEXTS, ids=IDS)
        (tmp_path / "vectors.faiss.tmp").mkdir()
    assert "vectors.faiss was not written" in caplog.text
    with DocumentStore(tmp_path, WordEmbedder()) as store:
        assert answers(store) == IDS


def test_other_embedder_is_refused_with_both_names(tmp_path: Path) -> None:
    database = build(tmp_path)
    before = database.read_bytes()
    for embedder in (WordEmbedder(name="sentences"), SentenceTransformerEmbedder()):
        with pytest.raises(IndexMismatchError, match=f"'words'.*{embedder.name!r}"):
            DocumentStore(tmp_path, embedder)
    assert database.read_bytes() == before


def test_same_name_with_other_dimension_is_refused(tmp_path: Path) -> None:
    build(tmp_path)
    with DocumentStore(tmp_path, WordEmbedder(dim=32)) as store:
        with pytest.raises(ValueError, match=r"words.*\[1, 32\].*\[1, 64\]"):
            store.search("text")
        with pytest.raises(ValueError, match="words"):
            store.add(["text"])
        assert len(store) == 40


@pytest.mark.parametrize("damage", ["empty", "truncated", "header", "page", "text file", "no tables"])
def test_damaged_database_is_named_and_not_overwritten(tmp_path: Path, damage: str) -> None:
    database = build(tmp_path)
    (tmp_path / "vectors.faiss").unlink()
    data = bytearray(database.read_bytes())
    if damage == "empty":
        data.clear()
    elif damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "header":
        data[:100] = b"\xff" * 100
    elif damage == "page":
        data[4096 * 2 : 4096 * 3] = b"\xa5" * 4096
    elif damage == "text file":
        data = bytearray(b"this is not a database\n" * 400)
    if damage == "no tables":
        database.unlink()
        sqlite3.connect(database).execute("CREATE TABLE notes (note)").connection.close()
        data = bytearray(database.read_bytes())
    database.write_bytes(data)
    with pytest.raises(IndexMismatchError, match=r"documents\.sqlite is damaged"):
        DocumentStore(tmp_path, WordEmbedder())
    assert database.read_bytes() == data


def test_damage_that_sqlite_cannot_notice(tmp_path: Path) -> None:
    database = build(tmp_path)
    data = bytearray(database.read_bytes())
    data[data.rindex(b"text number 17")] ^= 1
    database.write_bytes(data)
    with DocumentStore(tmp_path, WordEmbedder()) as store:
        for call in (
            lambda: store.get(["17"]),
            lambda: store.search(TEXTS[17]),
            lambda: list(store.documents()),
        ):
            with pytest.raises(IndexMismatchError, match=r"documents\.sqlite is damaged: the checksum"):
                call()
        assert store.get(["18"])[0].text == TEXTS[18]
    assert database.read_bytes() == data


def test_newer_format_is_refused(tmp_path: Path) -> None:
    database = build(tmp_path)
    with sqlite3.connect(database) as connection:
        connection.execute("UPDATE meta SET value = 99 WHERE name = 'format'")
    connection.close()
    with pytest.raises(IndexMismatchError, match="format 99"):
        DocumentStore(tmp_path, WordEmbedder())


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheUnavailableError, match="file"):
        DocumentStore(tmp_path / "file", WordEmbedder())
    with pytest.raises(ValueError, match="no document store"):
        DocumentStore.load(tmp_path / "absent", WordEmbedder())
    assert not (tmp_path / "absent").exists()


def test_save_copies_and_parts(tmp_path: Path) -> None:
    memory = DocumentStore(embedder=WordEmbedder())
    memory.add(TEXTS, ids=IDS)
    with pytest.raises(ValueError, match="path=None"):
        memory.save()
    memory.save(tmp_path / "copy")
    with pytest.raises(ValueError, match="already"):
        memory.save(tmp_path / "copy")
    memory.delete(["3"])
    with DocumentStore.load(tmp_path / "copy", WordEmbedder()) as copy:
        assert answers(copy) == IDS
        copy.delete(["5"])
        assert len(memory) == 39
        assert [document.id for document in memory.get(["3", "5"])] == ["5"]


def test_a_second_store_on_the_directory_sees_changes(tmp_path: Path) -> None:
    with DocumentStore(tmp_path, WordEmbedder()) as first, DocumentStore(tmp_path, WordEmbedder()) as second:
        first.add(TEXTS, ids=IDS)
        assert answers(second) == IDS
        second.delete(["4"])
        second.upsert(["something new"], ids=["5"])
        assert first.search("something new", k=1)[0].id == "5"
        assert "4" not in {document.id for document in first.search(TEXTS[4], k=100)}
        first.add(["another"], ids=["a"])
        assert second.search("another", k=1)[0].id == "a"
        with pytest.raises(ValueError, match="'a'"):
            second.add(["another"], ids=["a"])


ids = st.sampled_from("abcdef")
texts = st.sampled_from(["red fox", "blue fox", "red hen", "", "\ud800 fox", "red \0 hen", "grey owl"])


class StoreAgainstDictionary(RuleBasedStateMachine):
    """Any sequence of changes, reopenings and crashes gives what a dictionary would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.crashes = 0
        self.open()
        self.model: dict[str, str] = {}

    def open(self) -> None:
        self.store = DocumentStore(self.directory / str(self.crashes), WordEmbedder())

    @rule(id=ids, text=texts)
    def add(self, id: str, text: str) -> None:
        if id in self.model:
            with pytest.raises(ValueError, match=repr(id)):
                self.store.add([text], ids=[id])
        else:
            self.store.add([text], ids=[id])
            self.model[id] = text

    @rule(changes=st.lists(st.tuples(ids, texts), max_size=5))
    def upsert(self, changes: list[tuple[str, str]]) -> None:
        self.store.upsert([text for _, text in changes], ids=[id for id, _ in changes])
        self.model.update(dict(changes))

    @rule(removed=st.lists(ids, max_size=3))
    def delete(self, removed: list[str]) -> None:
        assert self.store.delete(removed) == len(set(removed) & set(self.model))
        for id in removed:
            self.model.pop(id, None)

    @rule()
    def save(self) -> None:
        self.store.save()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        self.crashes += 1
        shutil.copytree(self.directory / str(self.crashes - 1), self.directory / str(self.crashes))
        self.store.close()
        self.open()

    @invariant()
    def holds_what_the_dictionary_holds(self) -> None:
        assert {document.id: document.text for document in self.store.documents()} == self.model
        for query in ("red fox", "grey owl"):
            found = self.store.search(query, k=20)
            assert {document.id: document.text for document in found} == self.model
            embedder = WordEmbedder()
            for document in found:
                exact = float(embedder.encode_query(query) @ embedder.encode_query(document.text))
                assert document.score == pytest.approx(exact, abs=1e-5)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


StoreAgainstDictionary.TestCase.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
TestStoreAgainstDictionary = StoreAgainstDictionary.TestCase
