"""`daric-rag warm`: compute and keep the KV of a folder's documents."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from daric_rag.commands.documents import Folder, read_folder, split_folder
from daric_rag.commands.engine_options import (
    add_engine_options,
    make_config,
    start_engine,
    tell,
    tell_skipped,
)
from daric_rag.commands.table import bytes_text, print_pairs

if TYPE_CHECKING:
    from daric_rag.config import DaricConfig
    from daric_rag.engine.engine import DaricEngine
    from daric_rag.engine.result import WarmResult

_WRITING_S = 60.0  # how long to wait for the disk


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "warm",
        help="compute the KV of a folder's documents and keep it",
        description="Compute the KV of every document of a folder and keep it on disk, so that the first "
        "question over it is as fast as the second. What is stored already is left alone.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Warm the folder and print what was done."""
    config = make_config(options)
    folder = read_folder(options.folder)
    tell_skipped(folder)
    with start_engine(options, config) as engine:
        documents = split_folder(
            folder, options.split_tokens, lambda text: len(engine.processor.tokenize(text))
        )
        result = engine.warm([document.text for document in documents])
        store = wait_for_disk(engine)
    summary = _summary(folder, result, config, store)
    if options.json:
        print(json.dumps(summary))
        return 0
    print_pairs(_pairs(summary))
    if config.disk_path is None:
        tell("The KV was in memory only and is gone now; without --no-disk it is kept.")
    return 0


def wait_for_disk(engine: DaricEngine) -> dict[str, Any]:
    """The store's counters once everything is written, or after a minute."""
    deadline = time.monotonic() + _WRITING_S
    while True:
        store: dict[str, Any] = engine.stats()["store"]
        if not store["pending_writes"] or time.monotonic() > deadline:
            return store
        time.sleep(0.05)


def _summary(
    folder: Folder, result: WarmResult, config: DaricConfig, store: dict[str, Any]
) -> dict[str, Any]:
    return {
        "files": len(folder.files),
        "skipped_files": [asdict(file) for file in folder.skipped],
        **asdict(result),
        "disk_path": config.disk_path,
        "disk_bytes": store["disk_bytes"],
        "host_bytes": store["host_bytes"],
    }


def _pairs(summary: dict[str, Any]) -> list[tuple[str, str]]:
    speed = summary["generated_tokens"] / max(summary["seconds"], 1e-9)
    pairs = [
        ("files", f"{summary['files']}, {len(summary['skipped_files'])} skipped"),
        ("documents", f"{summary['documents']}, {summary['cached_documents']} of them stored before"),
        ("tokens", f"{summary['tokens']}, padding included"),
        ("computed now", f"{summary['generated_tokens']} tokens"),
        ("time", f"{summary['seconds']:.1f} s, {speed:.0f} tokens/s computed"),
        ("in memory", bytes_text(summary["host_bytes"])),
    ]
    if summary["disk_path"] is not None:
        pairs.append(("on disk", f"{bytes_text(summary['disk_bytes'])} in {summary['disk_path']}"))
    return pairs
