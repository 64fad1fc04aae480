"""A model in a Hugging Face hub cache, as vLLM's own download leaves it: only the files that it needs."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path


def put_into_hub_cache(source: Path, cache: Path, hub_id: str, absent: Sequence[str] = ()) -> Path:
    """Copy `source` into `cache` as revision main of `hub_id`; returns its snapshot.

    `absent`: files that the repository has and that were not downloaded. The cached listing names them.
    """
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    commit = hashlib.sha1(hub_id.encode()).hexdigest()
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", repository / "trees", snapshot):
        folder.mkdir(parents=True)
    listing = {name: {"size": 1, "blob_id": "0" * 40} for name in absent}
    for file in source.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, repository / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob)
        listing[file.name] = {"size": file.stat().st_size, "blob_id": blob}
    (repository / "refs" / "main").write_text(commit)
    (repository / "trees" / f"{commit}.json").write_text(json.dumps({"format_version": 1, "files": listing}))
    return snapshot
