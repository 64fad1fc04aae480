"""The options that every command with an engine has, and starting the engine from them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from daric_rag.commands.documents import DEFAULT_SPLIT_TOKENS, Folder
from daric_rag.commands.interrupt import interruptible_start
from daric_rag.commands.quiet import held_back_stderr
from daric_rag.config import DaricConfig
from daric_rag.engine.selection import STRATEGIES
from daric_rag.errors import DaricError
from daric_rag.models import models_directory, resolve_model

if TYPE_CHECKING:
    from daric_rag.engine.engine import DaricEngine

GIB = 1 << 30
DEFAULT_DISK_GIB = 4.0
MAX_DISK_GIB = 1e9  # infinity is no whole number of bytes


def cache_directory() -> Path:
    """Where the command keeps its things: `$XDG_CACHE_HOME/daric_rag`, else under `~/.cache`."""
    return models_directory().parent


def default_disk_path() -> str:
    """Where the command keeps documents' KV unless told otherwise."""
    return str(cache_directory() / "kv")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the model, where its KV is kept, and how much vLLM says."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="smollm2-135m", help="embedded model, path or hub id (%(default)s)")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="window (the model's own)")
    disk = group.add_mutually_exclusive_group()
    disk.add_argument("--disk", metavar="DIR", help=f"keep KV in this folder ({default_disk_path()})")
    disk.add_argument("--no-disk", action="store_true", help="keep KV in memory only")
    group.add_argument(
        "--disk-gib", type=float, default=DEFAULT_DISK_GIB, metavar="GIB", help="its budget (%(default)s)"
    )
    group.add_argument(
        "--index", default="memory", help="memory, or a redis:// or rediss:// URL (%(default)s)"
    )
    group.add_argument("--namespace", default="", help="tenant: nothing is shared across namespaces")
    group.add_argument(
        "--split-tokens",
        type=int,
        default=DEFAULT_SPLIT_TOKENS,
        metavar="TOKENS",
        help="longer files become several documents (%(default)s)",
    )
    group.add_argument("--verbose", action="store_true", help="show vLLM's own messages")


def add_reuse_options(parser: argparse.ArgumentParser) -> None:
    """Add how documents' KV is reused."""
    group = parser.add_argument_group("reuse")
    group.add_argument(
        "--selection",
        default="daric",
        help=f"which tokens are recomputed: {', '.join(STRATEGIES)} (%(default)s)",
    )
    group.add_argument(
        "--n-avg",
        type=int,
        default=32,
        metavar="TOKENS",
        help="recomputed per chunk, on average (%(default)s)",
    )
    group.add_argument("--no-reuse", action="store_true", help="plain vLLM over the same prompt")


def make_config(options: argparse.Namespace) -> DaricConfig:
    """The configuration of a command. Raises `ValueError` in one line."""
    values: dict[str, Any] = {
        "disk_path": None if options.no_disk else options.disk or default_disk_path(),
        "disk_bytes": int(min(options.disk_gib, MAX_DISK_GIB) * GIB),
        "index": options.index,
        "namespace": options.namespace,
    }
    if hasattr(options, "selection"):
        values |= {"selection": options.selection, "n_avg": options.n_avg, "reuse": not options.no_reuse}
    try:
        return DaricConfig(**values)
    except ValidationError as error:
        raise ValueError(one_line(error)) from None


def one_line(error: ValidationError) -> str:
    """What is wrong with each option, without pydantic's layout."""
    messages = []
    for item in error.errors(include_url=False, include_context=False):
        message = item["msg"].removeprefix("Value error, ")
        name = ".".join(map(str, item["loc"]))
        # Without a name it is about several options at once, and the input is all of them.
        messages.append(message if name in message else f"{name}={item['input']!r}: {message}")
    return "; ".join(messages)


def start_engine(options: argparse.Namespace, config: DaricConfig) -> DaricEngine:
    """Prepare the model and start vLLM. Raises `DaricError` or `ValueError` if that does not work."""
    path = resolve_model(options.model)  # shows its progress, the first time
    tell(f"Starting vLLM with {options.model} …")
    arguments = {} if options.max_model_len is None else {"max_model_len": options.max_model_len}
    try:
        with held_back_stderr(options.verbose), interruptible_start():
            from daric_rag.engine.engine import DaricEngine

            return DaricEngine(path, config, **arguments)
    except ValidationError as error:
        raise ValueError(f"vLLM refuses {options.model!r}: {one_line(error)}") from error
    except (OSError, RuntimeError) as error:
        raise DaricError(f"vLLM could not start with {options.model!r}: {error}") from error


def tell_skipped(folder: Folder) -> None:
    """Name the files that were left out."""
    for file in folder.skipped:
        tell(f"skipped {file.name}: {file.reason}")


def tell(message: str) -> None:
    """A line for the person at the terminal: standard error."""
    print(message, file=sys.stderr, flush=True)
