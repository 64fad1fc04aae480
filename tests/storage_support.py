"""Small segments with recognisable bytes, shared by the tests of the KV storage."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from daric_rag.engine.storage import KVStore, ReadHandle, RecordSpec

SPEC = RecordSpec(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32")
ROOT = b"R" * 32


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def payload_of(key: bytes, num_tokens: int, spec: RecordSpec = SPEC) -> npt.NDArray[np.uint8]:
    """Bytes that no other key has."""
    generator = np.random.default_rng(int.from_bytes(key[:8], "little"))
    return generator.integers(0, 256, spec.payload_nbytes(num_tokens), dtype=np.uint8)


def open_store(path: Path | str | None = None, *, records: float = 8, **options: Any) -> KVStore:
    """A store with room for `records` records of 16 tokens in host memory, and for 1000 on disk."""
    spec = options.pop("spec", SPEC)
    options.setdefault("host_bytes", int(records * spec.payload_nbytes(16)))
    if path is not None:
        options.setdefault("disk_bytes", 1000 * (4096 + spec.payload_nbytes(16)))
    options.setdefault("root", ROOT)
    return KVStore(spec, disk_path=None if path is None else str(path), **options)


def save(store: KVStore, key: bytes, parent: bytes = b"", num_tokens: int = 16) -> bool:
    """Save a segment; False if there was no room or no need."""
    handle = store.reserve(key, parent, num_tokens)
    if handle is None:
        return False
    handle.data[:] = payload_of(key, num_tokens, store.spec)
    store.commit(handle)
    return True


def is_intact(handle: ReadHandle, spec: RecordSpec = SPEC) -> bool:
    """Whether every layer arrives; each that does must be right."""
    expected = payload_of(handle.key, handle.num_tokens, spec)
    step = spec.layer_nbytes(handle.num_tokens)
    for layer in range(spec.num_layers):
        if not handle.wait(layer):
            return False
        part = slice(layer * step, (layer + 1) * step)
        assert np.array_equal(handle.data[part], expected[part]), f"wrong bytes served in layer {layer}"
    return True


def load(store: KVStore, key: bytes) -> bool:
    """Whether `key` is served, whole and right."""
    handle = store.acquire(key)
    if handle is None:
        return False
    try:
        return is_intact(handle, store.spec)
    finally:
        store.release(handle)


def record_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))
