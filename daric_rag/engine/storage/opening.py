"""From the configuration to a worker's store."""

from __future__ import annotations

import os
import tempfile

from daric_rag.config import DaricConfig
from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.store import KVStore
from daric_rag.errors import CacheUnavailableError


def open_store(
    config: DaricConfig,
    spec: RecordSpec,
    root: bytes,
    *,
    model_id: str,
    rank: int,
    num_ranks: int = 1,
    longest_prompt: int,
    pin_memory: bool,
) -> KVStore:
    """One worker's store: its share of the configured budgets, which are those of a whole engine.

    Beside the arena there is room for a prompt of `longest_prompt` tokens, if there is a disk tier that it can go
    to or come from. Raises `CacheUnavailableError` if the directory cannot be used.
    """
    host_bytes = max(config.host_bytes // num_ranks, 1)
    return KVStore(
        spec,
        host_bytes=host_bytes,
        detached_bytes=max(host_bytes, spec.payload_nbytes(longest_prompt)),
        disk_path=config.disk_path,
        disk_bytes=config.disk_bytes,
        model_id=model_id,
        rank=rank,
        num_ranks=num_ranks,
        root=root,
        pin_memory=pin_memory,
        namespace=config.namespace,
    )


def check_directory(config: DaricConfig) -> None:
    """Raise `CacheUnavailableError` unless the disk tier's directory, if there is one, can be written."""
    if config.disk_path is None:
        return
    try:
        os.makedirs(config.disk_path, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.disk_path):
            pass
    except OSError as error:
        raise CacheUnavailableError(
            f"disk_path={config.disk_path!r} cannot be written ({error.strerror}); use a writable directory, "
            "or leave disk_path out"
        ) from None
