"""From the configuration to an index that knows what the disk tier holds."""

import hashlib
import os
import uuid
from functools import partial
from pathlib import Path

from daric_rag.config import DaricConfig
from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.scheduling.index.base import KVIndex, Probe
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.storage.directory import is_stored, stored_keys


def open_index(config: DaricConfig, root: SegmentKey, num_ranks: int = 1) -> KVIndex:
    """The scheduler's index, filled with the records of `root` that all `num_ranks` tensor-parallel ranks have.

    Raises `CacheUnavailableError` if Redis cannot be used, `MissingExtraError` if its client is not installed.
    """
    path = config.disk_path
    if path is None:
        return new_index(config.index)
    # Another engine on the same directory may add records while this one runs.
    probe = partial(is_stored, path, root, num_ranks)
    index = new_index(config.index, probe=probe, disk_id=shared_disk_id(path))
    index.insert(list(stored_keys(path, root, num_ranks)), Tier.DISK)
    return index


def check_index(config: DaricConfig) -> None:
    """Raise what `open_index` would if its server cannot be used."""
    new_index(config.index).close()


def new_index(index: str, *, probe: Probe | None = None, disk_id: str | None = None) -> KVIndex:
    """An index as the option `index` names it: "memory", or a `redis://` or `rediss://` URL.

    `probe` is for the memory index (see `MemoryIndex`), `disk_id` for Redis (see `RedisIndex`).

    Raises:
        ValueError: `index` is neither.
        MissingExtraError: the `redis` client is not installed.
        CacheUnavailableError: the server cannot be used; the message hides the password.
    """
    if index == "memory":
        return MemoryIndex(probe)
    if index.startswith(("redis://", "rediss://")):
        from daric_rag.engine.scheduling.index.redis import RedisIndex

        return RedisIndex(index, shared_disk_id=disk_id)
    raise ValueError(
        f"index={index.partition(':')[0]!r}…: allowed are 'memory', 'redis://…' and 'rediss://…'"
    )


def shared_disk_id(directory: str | os.PathLike[str]) -> str:
    """Return 32 hex digits, the same for every engine of this machine that uses this directory.

    Made of the machine's id and the directory's device and inode, so that neither links nor mount points
    matter.

    Raises:
        OSError: `directory` does not exist.
    """
    status = os.stat(directory)
    name = f"{_machine_id()}:{status.st_dev}:{status.st_ino}"
    return hashlib.blake2b(name.encode(), digest_size=16, person=b"daric-rag disk").hexdigest()


def _machine_id() -> str:
    for file in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            machine_id = Path(file).read_text().strip()
        except OSError:
            continue
        if machine_id:
            return machine_id
    return f"{uuid.getnode():x}"
