"""What the records under one root belong to: a small JSON file for people and tools."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import asdict, dataclass, field, replace

from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.directory import root_directory

MANIFEST = "manifest.json"
LOCK = ".lock"
MAX_MANIFEST_NBYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """Model, shape and tenants of one root; reading records needs none of it."""

    root: bytes
    model_id: str = ""
    spec: RecordSpec | None = None
    namespaces: dict[str, str] = field(default_factory=dict)
    """Namespace digest in hex -> its name."""

    def to_json(self) -> dict[str, object]:
        """The fields of the file."""
        shape = {} if self.spec is None else asdict(self.spec)
        names = {"root": self.root.hex(), "model_id": self.model_id, "namespaces": self.namespaces}
        return {**names, **shape}


def read_manifest(path: str, root: bytes) -> Manifest:
    """The manifest of a root; an empty one if it is missing or damaged."""
    try:
        with open(os.path.join(root_directory(path, root), MANIFEST), "rb") as file:
            return parse_manifest(root, file.read(MAX_MANIFEST_NBYTES))
    except OSError:
        return Manifest(root)


def parse_manifest(root: bytes, text: bytes) -> Manifest:
    """The manifest written as `text`; an empty one if that is damaged."""
    try:
        data = json.loads(text)
        spec = RecordSpec(data["num_layers"], data["num_kv_heads"], data["head_dim"], data["dtype"])
        names = {str(digest): str(name) for digest, name in data["namespaces"].items()}
        return Manifest(root, str(data["model_id"]), spec, names)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Manifest(root)


def update_manifest(path: str, manifest: Manifest) -> None:
    """Write the manifest of a root, keeping the namespaces that other engines entered. Raises `OSError`."""
    directory = root_directory(path, manifest.root)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, LOCK), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_manifest(path, manifest.root)
        merged = replace(manifest, namespaces={**known.namespaces, **manifest.namespaces})
        if merged != known:
            write_json(directory, MANIFEST, merged.to_json())


def write_json(directory: str, name: str, values: object) -> None:
    """Write a small file so that it is whole or as it was before. Raises `OSError`."""
    temporary = os.path.join(directory, f".{name}-{os.getpid()}-{threading.get_native_id()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(directory, name))
