"""What the records under one root belong to: a small JSON file for people and tools."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import dataclass, field, replace

from daric_rag.engine.storage.base import RecordSpec
from daric_rag.engine.storage.directory import root_directory

MANIFEST = "manifest.json"
MAX_MANIFEST_NBYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """Model, shape and tenants of one root; reading records needs none of it."""

    root: bytes
    model_id: str = ""
    spec: RecordSpec | None = None
    namespaces: dict[str, str] = field(default_factory=dict)
    """Namespace digest in hex -> its name."""


def read_manifest(path: str, root: bytes) -> Manifest:
    """The manifest of a root; what is missing or damaged in it is left at its default."""
    manifest = Manifest(root)
    try:
        with open(os.path.join(root_directory(path, root), MANIFEST), "rb") as file:
            data = json.loads(file.read(MAX_MANIFEST_NBYTES))
        spec = RecordSpec(data["num_layers"], data["num_kv_heads"], data["head_dim"], data["dtype"])
        names = {str(digest): str(name) for digest, name in data["namespaces"].items()}
        return Manifest(root, str(data["model_id"]), spec, names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return manifest


def update_manifest(path: str, manifest: Manifest) -> None:
    """Write the manifest of a root, keeping the namespaces that other engines entered. Raises `OSError`."""
    directory = root_directory(path, manifest.root)
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, ".lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_manifest(path, manifest.root)
        merged = replace(manifest, namespaces={**known.namespaces, **manifest.namespaces})
        if merged != known:
            _write_manifest(directory, merged)


def _write_manifest(directory: str, manifest: Manifest) -> None:
    spec = manifest.spec
    data: dict[str, object] = {
        "root": manifest.root.hex(),
        "model_id": manifest.model_id,
        "namespaces": manifest.namespaces,
    }
    if spec is not None:
        data |= {
            "num_layers": spec.num_layers,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "dtype": spec.dtype,
        }
    temporary = os.path.join(directory, f".manifest-{os.getpid()}-{threading.get_native_id()}")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(directory, MANIFEST))
