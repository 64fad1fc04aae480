"""From the configuration's `index` option to an index."""

import hashlib
import os
import uuid
from pathlib import Path

from daric_rag.engine.scheduling.index.base import KVIndex, Probe
from daric_rag.engine.scheduling.index.memory import MemoryIndex


def open_index(index: str, *, probe: Probe | None = None, shared_disk_id: str | None = None) -> KVIndex:
    """Return the index that the option `index` names: "memory", or a `redis://` or `rediss://` URL.

    `probe` is for the memory index (see `MemoryIndex`), `shared_disk_id` for Redis (see `RedisIndex`).

    Raises:
        ValueError: `index` is neither.
        MissingExtraError: the `redis` client is not installed.
        CacheUnavailableError: the server cannot be used; the message hides the password.
    """
    if index == "memory":
        return MemoryIndex(probe)
    if index.startswith(("redis://", "rediss://")):
        from daric_rag.engine.scheduling.index.redis import RedisIndex

        return RedisIndex(index, shared_disk_id=shared_disk_id)
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
