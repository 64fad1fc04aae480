"""What a person does with a disk tier: look, verify, clear. Safe while engines use the directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.counters import COUNTERS, read_counters
from daric_rag.engine.storage.directory import (
    FoundFile,
    list_ranks,
    list_records,
    list_roots,
    load_header,
    rank_directory,
    remove_orphans,
    root_directory,
)
from daric_rag.engine.storage.manifest import LOCK, MANIFEST, Manifest, read_manifest
from daric_rag.engine.storage.record import (
    DamagedRecordError,
    RecordHeader,
    check_layer,
    namespace_digest,
    open_record,
    read_header,
)

MIN_ROOT_PREFIX = 8

Progress = Callable[[int], None]
"""Called with the number of records seen so far."""


@dataclass(frozen=True)
class CachedModel:
    """What one root directory holds; `documents` counts chunks by their last segments."""

    root: bytes
    model_id: str
    spec: RecordSpec | None
    namespaces: tuple[str, ...]
    ranks: tuple[int, ...]
    documents: int
    records: int
    num_tokens: int
    nbytes: int
    host_nbytes: int = 0
    """In the memory of the engines that run now, as they last reported."""
    hits: int = 0
    evictions: int = 0
    """Records that were used, and that left a tier to make room, since the directory was made."""


@dataclass(frozen=True)
class RemovalReport:
    """What was looked at and what was deleted."""

    examined: int
    removed: int
    removed_nbytes: int
    removed_keys: tuple[SegmentKey, ...]


@dataclass(frozen=True)
class StoredRecord:
    """A file of a selection; `header` is None if it is damaged."""

    root: bytes
    rank: int
    file: FoundFile
    header: RecordHeader | None


def list_models(path: str) -> list[CachedModel]:
    """Every model (root) that has records below `path`."""
    return [_describe(path, root) for root in list_roots(path)]


def verify(
    path: str, *, model: str | None = None, namespace: str | None = None, progress: Progress | None = None
) -> RemovalReport:
    """Read every record whole, compare all checksums, and delete what is damaged.

    With a `namespace`, files whose header is damaged belong to nobody and are left alone.
    """
    examined, removed, nbytes = 0, [], 0
    for record in select_records(path, model=model, namespace=namespace):
        examined += 1
        try:
            if record.header is None:
                raise DamagedRecordError("header")
            verify_file(record)
        except OSError:  # gone meanwhile, or not ours to read
            continue
        except DamagedRecordError:
            if _delete(record.file.path):
                removed.append(record.file.key)
                nbytes += record.file.nbytes
        finally:
            if progress is not None:
                progress(examined)
    return RemovalReport(examined, len(removed), nbytes, tuple(removed))


def clear(path: str, *, model: str | None = None, namespace: str | None = None) -> RemovalReport:
    """Delete the records of a model, of a namespace, or all; a running engine sees misses from then on."""
    examined, removed, nbytes = 0, [], 0
    for record in select_records(path, model=model, namespace=namespace):
        examined += 1
        if _delete(record.file.path):
            removed.append(record.file.key)
            nbytes += record.file.nbytes
    for root in list_roots(path):
        if namespace is None and matches(read_manifest(path, root), model):
            _remove_directories(path, root)
    return RemovalReport(examined, len(removed), nbytes, tuple(removed))


def select_records(
    path: str, *, model: str | None = None, namespace: str | None = None
) -> Iterator[StoredRecord]:
    """The records of a model (its id, or 8 or more hex digits of its root) and a namespace; None is any."""
    digest = None if namespace is None else namespace_digest(namespace)
    for root in list_roots(path):
        if not matches(read_manifest(path, root), model):
            continue
        for rank in list_ranks(path, root):
            for file in list_records(path, root, rank):
                header = load_header(file.path, root, file.key)
                if digest is None or (header is not None and header.namespace == digest):
                    yield StoredRecord(root, rank, file, header)


def matches(manifest: Manifest, model: str | None) -> bool:
    """Whether a root is the model that a person named."""
    if model is None or model == manifest.model_id:
        return True
    return len(model) >= MIN_ROOT_PREFIX and manifest.root.hex().startswith(model.lower())


def verify_file(record: StoredRecord) -> None:
    """Read a record a layer at a time. Raises `DamagedRecordError`, `OSError`."""
    fd = open_record(record.file.path)
    try:
        header = read_header(fd)
        buffer = np.empty(header.spec.layer_nbytes(header.num_tokens), dtype=np.uint8)
        for layer in range(header.spec.num_layers):
            check_layer(fd, header, layer, buffer)
    finally:
        os.close(fd)


def _describe(path: str, root: bytes) -> CachedModel:
    manifest = read_manifest(path, root)
    keys: set[SegmentKey] = set()
    parents: set[SegmentKey] = set()
    digests: set[str] = set()
    records = num_tokens = nbytes = 0
    spec = manifest.spec
    ranks = list_ranks(path, root)
    for rank in ranks:
        for file in list_records(path, root, rank):
            header = load_header(file.path, root, file.key)
            if header is None:
                continue
            records += 1
            nbytes += file.nbytes
            if file.key not in keys:
                num_tokens += header.num_tokens
            keys.add(file.key)
            parents.add(header.parent)
            digests.add(header.namespace.hex())
            spec = header.spec
    names = tuple(sorted(manifest.namespaces.get(digest, "") for digest in digests))
    used = read_counters(path, root)
    return CachedModel(
        root,
        manifest.model_id,
        spec,
        names,
        tuple(ranks),
        documents=len(keys - parents),
        records=records,
        num_tokens=num_tokens,
        nbytes=nbytes,
        host_nbytes=sum(used.host_bytes.values()),
        hits=used.counts["host_hits"] + used.counts["disk_hits"],
        evictions=used.counts["evictions"] + used.counts["disk_evictions"],
    )


def _delete(file: str) -> bool:
    try:
        os.unlink(file)
    except OSError:
        return False
    return True


def _remove_directories(path: str, root: bytes) -> None:
    """Remove what is empty; a directory in use is made again by who uses it."""
    for rank in list_ranks(path, root):
        remove_orphans(path, root, rank)
        top = rank_directory(path, root, rank)
        with contextlib.suppress(OSError):
            for name in os.listdir(top):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(top, name))
            os.rmdir(top)
    if list_ranks(path, root):
        return
    directory = root_directory(path, root)
    for name in (MANIFEST, COUNTERS, LOCK):
        _delete(os.path.join(directory, name))
    with contextlib.suppress(OSError):
        os.rmdir(directory)
