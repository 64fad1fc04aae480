"""Listing, verifying, clearing, exporting and importing a disk tier."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from daric_rag.engine.storage import record_path, stored_keys
from daric_rag.engine.storage.archive import export_records, import_records
from daric_rag.engine.storage.counters import report_counters
from daric_rag.engine.storage.maintenance import clear, list_models, verify
from daric_rag.engine.storage.manifest import Manifest, read_manifest, update_manifest
from daric_rag.engine.storage.record import MAGIC
from tests.storage_support import ROOT, SPEC, key_of, load, open_store, record_files, save

OTHER = b"O" * 32


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Model `first`: a chunk of three segments and one of one (tenant `t`); model `second`: one."""
    path = tmp_path / "cache"
    store = open_store(path, model_id="first")
    for number in range(3):
        save(store, key_of(number), key_of(number - 1) if number else ROOT)
    handle = store.reserve(key_of(10), ROOT, 7, namespace="t")
    assert handle is not None
    store.abort(handle)
    store.close()
    store = open_store(path, model_id="first", namespace="t")
    save(store, key_of(10), ROOT, 7)
    store.close()
    store = open_store(path, model_id="second", root=OTHER)
    save(store, key_of(20), OTHER)
    store.close()
    return path


def keys_in(path: Path, root: bytes = ROOT) -> set[bytes]:
    return stored_keys(str(path), root, 1)


def test_models_are_listed_for_people(cache: Path) -> None:
    second, first = sorted(list_models(str(cache)), key=lambda model: model.records)
    assert (first.model_id, first.root, first.spec, first.ranks) == ("first", ROOT, SPEC, (0,))
    assert (first.documents, first.records, first.num_tokens, first.namespaces) == (2, 4, 55, ("", "t"))
    assert first.nbytes == sum(file.stat().st_size for file in record_files(cache / ROOT.hex()))
    assert (second.model_id, second.documents, second.records) == ("second", 1, 1)


def test_nothing_there_is_an_empty_list(tmp_path: Path) -> None:
    assert list_models(str(tmp_path / "missing")) == []
    assert verify(str(tmp_path / "missing")).examined == 0
    assert clear(str(tmp_path / "missing")).removed == 0


def test_verify_deletes_what_is_damaged_and_nothing_else(cache: Path) -> None:
    assert verify(str(cache)).removed == 0
    for number, position in ((1, 50), (20, 4096 + 100)):
        root = ROOT if number == 1 else OTHER
        file = Path(record_path(str(cache), root, 0, key_of(number)))
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)
    seen: list[int] = []
    assert verify(str(cache), model="first", progress=seen.append).removed_keys == (key_of(1),)
    assert seen == [1, 2, 3, 4]
    report = verify(str(cache))
    assert (report.examined, report.removed_keys) == (4, (key_of(20),))
    assert keys_in(cache) == {key_of(0), key_of(2), key_of(10)} and keys_in(cache, OTHER) == set()


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, set()),
        ({"model": "first"}, {20}),
        ({"model": ROOT.hex()[:8]}, {20}),
        ({"model": ROOT.hex()[:7]}, {0, 1, 2, 10, 20}),
        ({"namespace": "t"}, {0, 1, 2, 20}),
        ({"namespace": ""}, {10}),
        ({"model": "second", "namespace": "t"}, {0, 1, 2, 10, 20}),
    ],
)
def test_clear(cache: Path, options: dict[str, str], left: set[int]) -> None:
    report = clear(str(cache), **options)
    assert {file.stem for file in record_files(cache)} == {key_of(number).hex() for number in left}
    assert report.removed == 5 - len(left)
    if not options:
        assert list(cache.iterdir()) == []


def test_engine_lives_through_a_clear(cache: Path) -> None:
    store = open_store(cache)
    assert store.flush(10)
    clear(str(cache))
    assert not load(store, key_of(0))
    for number in range(4):
        assert save(store, key_of(number))
    assert store.flush(10)
    assert keys_in(cache) == {key_of(number) for number in range(4)}
    assert not store.stats().read_only
    store.close()


def test_export_and_import_elsewhere(cache: Path, tmp_path: Path) -> None:
    archive, target = str(tmp_path / "warm.tar"), tmp_path / "target"
    report = export_records(str(cache), archive, model="first")
    assert (report.transferred, report.refused) == (4, ())
    report = import_records(str(target), archive)
    assert (report.transferred, report.present, report.refused) == (4, 0, ())
    assert import_records(str(target), archive).present == 4
    assert read_manifest(str(target), ROOT) == read_manifest(str(cache), ROOT)
    store = open_store(target)
    assert all(load(store, key_of(number)) for number in (0, 1, 2, 10))
    store.close()


def test_export_leaves_out_what_is_damaged(cache: Path, tmp_path: Path) -> None:
    file = Path(record_path(str(cache), ROOT, 0, key_of(1)))
    file.write_bytes(file.read_bytes()[:-1])
    report = export_records(str(cache), str(tmp_path / "a.tar"))
    assert (report.transferred, report.refused) == (4, (key_of(1).hex(),))


def test_export_to_nowhere_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError):
        export_records(str(cache), str(tmp_path / "missing" / "a.tar"))


def _flip(position: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[position] ^= 1

    return change


def _cut(data: bytearray) -> None:
    del data[-1]


@pytest.mark.parametrize("harm", [_flip(9), _flip(60), _flip(4096), _flip(-1), _cut, bytearray.clear])
def test_import_refuses_damaged_records(
    cache: Path, tmp_path: Path, harm: Callable[[bytearray], None]
) -> None:
    data = bytearray(Path(record_path(str(cache), ROOT, 0, key_of(0))).read_bytes())
    harm(data)
    archive = _archive(tmp_path, [(f"{ROOT.hex()}/0/{key_of(0).hex()}.kv", bytes(data))])
    report = import_records(str(tmp_path / "target"), archive)
    assert report.transferred == 0 and len(report.refused) == 1
    assert record_files(tmp_path / "target") == []


@pytest.mark.parametrize(
    "name",
    [
        f"{ROOT.hex()}/0/{key_of(1).hex()}.kv",  # another key
        f"{OTHER.hex()}/0/{key_of(0).hex()}.kv",  # another root
        f"../{ROOT.hex()}/0/{key_of(0).hex()}.kv",
        f"/{ROOT.hex()}/0/{key_of(0).hex()}.kv",
        f"{ROOT.hex()}/../{key_of(0).hex()}.kv",
        f"{ROOT.hex()}/99999/{key_of(0).hex()}.kv",
        f"{ROOT.hex()}/0/tmp/x",
    ],
)
def test_import_refuses_other_names(cache: Path, tmp_path: Path, name: str) -> None:
    data = Path(record_path(str(cache), ROOT, 0, key_of(0))).read_bytes()
    report = import_records(str(tmp_path / "target"), _archive(tmp_path, [(name, data)]))
    assert report.transferred == 0 and len(report.refused) == 1
    assert not any(file.is_file() for file in (tmp_path / "target").rglob("*"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_import_refuses_what_is_no_file(tmp_path: Path, kind: bytes) -> None:
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as tar:
        member = tarfile.TarInfo(f"{ROOT.hex()}/0/{key_of(0).hex()}.kv")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    assert len(import_records(str(tmp_path / "target"), str(archive)).refused) == 1


def test_import_refuses_sizes_that_the_archive_has_not(tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    member = tarfile.TarInfo(f"{ROOT.hex()}/0/{key_of(0).hex()}.kv")
    member.size = 1 << 40
    archive.write_bytes(member.tobuf() + MAGIC + bytes(10240))
    with pytest.raises(ValueError, match=r"a\.tar"):
        import_records(str(tmp_path / "target"), str(archive))


@pytest.mark.parametrize("data", [b"", b"no archive", bytes(100)])
def test_import_of_something_else_is_an_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.tar"):
        import_records(str(tmp_path / "target"), str(tmp_path / "a.tar"))


def test_import_of_a_cut_archive_keeps_what_is_whole(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.tar"
    export_records(str(cache), str(archive), model="first")
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(ValueError, match="cut off"):
        import_records(str(tmp_path / "target"), str(archive))
    assert 0 < len(keys_in(tmp_path / "target")) < 4
    assert verify(str(tmp_path / "target")).removed == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100000, '{"num_layers": "x"}', '{"namespaces": 3}', "\x00"]
)
def test_damaged_manifest_costs_names_only(cache: Path, text: str) -> None:
    (cache / ROOT.hex() / "manifest.json").write_text(text)
    (first,) = [model for model in list_models(str(cache)) if model.root == ROOT]
    assert (first.model_id, first.records, first.spec) == ("", 4, SPEC)
    store = open_store(cache, model_id="first")
    assert store.flush(10) and load(store, key_of(0))
    store.close()
    assert read_manifest(str(cache), ROOT).model_id == "first"


def test_manifest_keeps_the_tenants_of_other_engines(tmp_path: Path) -> None:
    for digest, name in (("aa", "one"), ("bb", "two")):
        update_manifest(str(tmp_path), Manifest(ROOT, "m", SPEC, {digest: name}))
    assert read_manifest(str(tmp_path), ROOT).namespaces == {"aa": "one", "bb": "two"}
    assert json.loads((tmp_path / ROOT.hex() / "manifest.json").read_text())["dtype"] == "float32"


def _archive(directory: Path, members: list[tuple[str, bytes]]) -> str:
    archive = directory / "made.tar"
    with tarfile.open(archive, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return str(archive)


def test_uses_are_counted_over_engines_and_restarts(tmp_path: Path) -> None:
    for restart in range(1, 3):
        store = open_store(tmp_path, records=2)
        for number in range(4):
            save(store, key_of(number))
            assert store.flush(10)
        assert load(store, key_of(0)) and not load(store, key_of(99))
        evictions = store.stats().evictions
        assert evictions > 0
        store.close()
        [model] = list_models(str(tmp_path))
        assert model.hits == restart
        assert model.evictions >= evictions
        assert model.host_nbytes == 0  # nobody runs


def test_host_bytes_of_dead_processes_do_not_count(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1))
    assert store.flush(10)
    report_counters(str(tmp_path), ROOT, {"host_hits": 3}, 700)
    counters_file = next(tmp_path.rglob("counters.json"))
    values = json.loads(counters_file.read_text())
    values["host_bytes"]["1-12345"] = 10**9  # no process of this number started then
    counters_file.write_text(json.dumps(values))
    [model] = list_models(str(tmp_path))
    assert (model.hits, model.host_nbytes) == (3, 700)
    for damaged in (
        "{",
        "[]",
        '{"counts": [], "host_bytes": 3}',
        '{"counts": {"misses": "x"}, "host_bytes": {}}',
    ):
        counters_file.write_text(damaged)
        [model] = list_models(str(tmp_path))
        assert (model.hits, model.host_nbytes) == (0, 0)
    store.close()
    [model] = list_models(str(tmp_path))
    assert model.hits == 0
