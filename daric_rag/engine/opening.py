"""Opening the index and the store that a configuration asks for."""

from __future__ import annotations

from daric_rag.config import DaricConfig
from daric_rag.engine.index.base import KVIndex
from daric_rag.engine.index.memory import MemoryIndex
from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.store import KVStore


def open_index(config: DaricConfig, root: bytes) -> KVIndex:
    """The scheduler's index. Raises `CacheUnavailableError` if Redis cannot be reached."""
    return MemoryIndex()


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
    )
