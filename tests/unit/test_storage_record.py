"""The file format: nothing in a file is believed without a check."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.record import (
    _FIELDS,
    PAGE,
    DamagedRecordError,
    RecordHeader,
    checksum,
    layer_checksums,
    namespace_digest,
    parse_header,
)
from tests.storage_support import ROOT, SPEC, key_of, load, open_store, payload_of, record_files, save

FIELDS = {
    "magic": 0,
    "version": 8,
    "header_nbytes": 12,
    "root": 16,
    "key": 48,
    "parent": 80,
    "namespace": 112,
    "dtype": 128,
    "num_layers": 144,
    "num_kv_heads": 148,
    "head_dim": 152,
    "num_tokens": 156,
    "payload_nbytes": 160,
    "checksum of the first layer": 168,
    "checksum of the last layer": 168 + 8 * (SPEC.num_layers - 1),
    "padding": 2000,
    "header checksum": PAGE - 8,
    "first byte of the payload": PAGE,
    "last byte of the payload": PAGE + SPEC.payload_nbytes(16) - 1,
}


def header_of(number: int = 1, num_tokens: int = 16, spec: RecordSpec = SPEC) -> RecordHeader:
    key = key_of(number)
    checksums = layer_checksums(spec, num_tokens, payload_of(key, num_tokens, spec))
    return RecordHeader(ROOT, key, key_of(0), namespace_digest("tenant"), spec, num_tokens, checksums)


@given(
    st.integers(1, 600),
    st.integers(1, 64),
    st.integers(1, 256),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 256),
    st.booleans(),
)
def test_header_round_trip(
    layers: int, heads: int, dim: int, dtype: str, num_tokens: int, has_parent: bool
) -> None:
    spec = RecordSpec(layers, heads, dim, dtype)
    parent = key_of(5) if has_parent else b""
    header = RecordHeader(
        ROOT, key_of(6), parent, namespace_digest(""), spec, num_tokens, tuple(range(layers))
    )
    data = header.pack()
    assert len(data) == header.payload_offset and len(data) % PAGE == 0
    assert parse_header(data, header.file_nbytes) == header


def test_header_layout_is_what_the_documentation_says() -> None:
    data = header_of().pack()
    assert data[:8] == b"DARICKV\0"
    assert struct.unpack_from("<II", data, FIELDS["version"]) == (1, PAGE)
    assert data[FIELDS["root"] :][:32] == ROOT
    assert data[FIELDS["key"] :][:32] == key_of(1)
    assert data[FIELDS["parent"] :][:32] == key_of(0)
    assert data[FIELDS["dtype"] :][:16] == b"float32".ljust(16, b"\0")
    assert struct.unpack_from("<IIIIQ", data, FIELDS["num_layers"]) == (3, 2, 4, 16, SPEC.payload_nbytes(16))
    assert _FIELDS.size == FIELDS["checksum of the first layer"]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("known", [True, False], ids=["scanned", "probed"])
def test_flipped_byte_is_a_miss_and_the_file_goes(tmp_path: Path, field: str, known: bool) -> None:
    with_store = open_store(tmp_path)
    save(with_store, key_of(1), key_of(0))
    save(with_store, key_of(2))
    with_store.close()
    (file,) = [file for file in record_files(tmp_path) if file.stem == key_of(1).hex()]

    store = open_store(tmp_path)
    if known:
        assert store.flush(10)
    _flip(file, FIELDS[field])
    assert not load(store, key_of(1))
    assert load(store, key_of(2))
    assert store.flush(10)
    assert store.stats().damaged == 1
    assert not file.exists()
    assert store.contains(key_of(1)) is None
    assert save(store, key_of(1), key_of(0)) and store.flush(10)
    store.close()

    reopened = open_store(tmp_path)
    assert load(reopened, key_of(1))
    reopened.close()


@given(st.integers(0, PAGE - 1), st.integers(1, 255))
def test_any_changed_header_byte_is_found(position: int, change: int) -> None:
    header = header_of()
    data = bytearray(header.pack())
    data[position] ^= change
    with pytest.raises(DamagedRecordError):
        parse_header(bytes(data), header.file_nbytes)


@given(st.binary(max_size=2 * PAGE))
def test_any_bytes_are_refused_cleanly(data: bytes) -> None:
    with pytest.raises(DamagedRecordError):
        parse_header(data, len(data))


@pytest.mark.parametrize(
    ("field", "layout", "value"),
    [
        ("num_tokens", "<I", 0),
        ("num_tokens", "<I", 2**32 - 1),
        ("num_kv_heads", "<I", 2**32 - 1),
        ("head_dim", "<I", 65535),
        ("num_layers", "<I", 2**32 - 1),
        ("num_layers", "<I", 0),
        ("header_nbytes", "<I", 2**32 - 4096),
        ("payload_nbytes", "<Q", 2**63),
        ("dtype", "16s", b"object"),
        ("dtype", "16s", b"\xff" * 16),
    ],
)
def test_hostile_sizes_with_right_checksums_allocate_nothing(
    tmp_path: Path, field: str, layout: str, value: object
) -> None:
    store = open_store(tmp_path)
    save(store, key_of(1), key_of(0))
    store.close()
    (file,) = record_files(tmp_path)
    data = bytearray(file.read_bytes())
    struct.pack_into(layout, data, FIELDS[field], value)
    struct.pack_into("<Q", data, PAGE - 8, checksum(bytes(data[: PAGE - 8])))
    file.write_bytes(data)

    store = open_store(tmp_path)
    tracemalloc.start()
    try:
        assert not load(store, key_of(1))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
        store.close()


def test_another_models_file_under_the_right_name_is_a_miss(tmp_path: Path) -> None:
    for root, spec in ((ROOT, SPEC), (b"O" * 32, SPEC), (b"S" * 32, RecordSpec(3, 4, 2, "float32"))):
        store = open_store(tmp_path, root=root, spec=spec)
        save(store, key_of(1))
        save(store, key_of(2))
        store.close()
    own = {file.stem: file for file in record_files(tmp_path / ROOT.hex())}
    for other in (b"O" * 32, b"S" * 32):
        store = open_store(tmp_path)
        assert store.flush(10)
        (foreign,) = [f for f in record_files(tmp_path / other.hex()) if f.stem == key_of(1).hex()]
        own[key_of(1).hex()].write_bytes(foreign.read_bytes())
        assert not load(store, key_of(1))
        own[key_of(2).hex()].write_bytes(own[key_of(2).hex()].read_bytes())
        assert load(store, key_of(2))
        store.close()
        store = open_store(tmp_path)
        save(store, key_of(1))
        store.close()


def test_checksum_covers_every_layer() -> None:
    payload = payload_of(key_of(1), 16)
    before = layer_checksums(SPEC, 16, payload)
    for layer in range(SPEC.num_layers):
        changed = payload.copy()
        changed[layer * SPEC.layer_nbytes(16)] ^= 1
        after = layer_checksums(SPEC, 16, changed)
        assert np.flatnonzero(np.array(before) != np.array(after)).tolist() == [layer]


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x40
    file.write_bytes(data)
