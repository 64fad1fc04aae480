"""Opening the index and the store that a configuration asks for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice

from daric_rag.config import DaricConfig
from daric_rag.engine.scheduling.index import opening
from daric_rag.engine.scheduling.index.base import IndexEntry, KVIndex, Tier
from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.directory import probe_record, scan_directory
from daric_rag.engine.storage.store import KVStore
from daric_rag.errors import CacheUnavailableError
from daric_rag.progress import progress_bar

# All ranks store the same segments; the scheduler looks at the files of the first.
_RANK = 0
_SCAN_BATCH = 1024


def open_index(config: DaricConfig, root: bytes) -> KVIndex:
    """The scheduler's index, filled with what the disk tier's directory holds already.

    Raises `CacheUnavailableError` if Redis cannot be used, `MissingExtraError` if its client is not installed.
    """
    index = _empty_index(config, root)
    if config.disk_path is not None:
        with progress_bar(0, "reading the disk tier", "segment") as bar:
            for entries in _batches(_stored(config.disk_path, root)):
                index.insert(entries)
                bar.update(len(entries))
    return index


def check_cache_locations(config: DaricConfig) -> None:
    """Raise `CacheUnavailableError` unless the disk tier's directory can be written and Redis answers."""
    if config.disk_path is not None:
        try:
            os.makedirs(config.disk_path, exist_ok=True)
            with tempfile.TemporaryFile(dir=config.disk_path):
                pass
        except OSError as error:
            raise CacheUnavailableError(
                f"disk_path={config.disk_path!r} cannot be written ({error.strerror}); use a writable directory, "
                "or leave disk_path out"
            ) from None
    if config.index != "memory":
        _empty_index(config, b"").close()


def open_store(
    config: DaricConfig, spec: RecordSpec, root: bytes, *, model_id: str, rank: int, pin_memory: bool
) -> KVStore:
    """One worker's store. Raises `CacheUnavailableError` if the directory cannot be used."""
    return KVStore(
        spec,
        host_bytes=max(config.host_bytes, 1),
        disk_path=config.disk_path,
        disk_bytes=config.disk_bytes,
        model_id=model_id,
        rank=rank,
        root=root,
        pin_memory=pin_memory,
        namespace=config.namespace,
    )


def _empty_index(config: DaricConfig, root: bytes) -> KVIndex:
    path = config.disk_path
    if path is None:
        return opening.open_index(config.index)
    # Another engine on the same directory may add records while this one runs.
    probe = partial(probe_record, path, root, _RANK)
    return opening.open_index(config.index, probe=probe, shared_disk_id=opening.shared_disk_id(path))


def _stored(path: str, root: bytes) -> Iterator[IndexEntry]:
    for key, parent, num_tokens in scan_directory(path, root, _RANK):
        yield IndexEntry(key, parent or root, num_tokens, Tier.DISK, root)


def _batches(entries: Iterator[IndexEntry]) -> Iterator[list[IndexEntry]]:
    while batch := list(islice(entries, _SCAN_BATCH)):
        yield batch
