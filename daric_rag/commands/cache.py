"""`daric-rag cache`: look at, verify, clear, export and import the KV that is kept on disk."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from daric_rag.commands.engine_options import default_disk_path, tell
from daric_rag.commands.table import bytes_text, print_pairs, print_table
from daric_rag.progress import progress_bar

if TYPE_CHECKING:
    from daric_rag.engine.scheduling.index.base import KVIndex
    from daric_rag.engine.storage.archive import TransferReport
    from daric_rag.engine.storage.maintenance import CachedModel, RemovalReport

_ROOT_DIGITS = 12
_REFUSED_SHOWN = 10


def add_parser(commands: Any) -> None:
    """Add the command and its five actions to the command line."""
    parser = commands.add_parser(
        "cache",
        help="look at, verify, clear, export or import the stored KV",
        description="The KV of documents that is kept on disk. Safe while engines use it.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    _action(actions, "stats", _stats, "what is stored, per model")
    _action(actions, "verify", _verify, "compare all checksums; delete what is damaged, repair the index")
    _action(actions, "clear", _clear, "delete what is stored")
    for name, run, text in (
        ("export", _export, "write what is stored into one archive"),
        ("import", _import, "take over an archive's content"),
    ):
        _action(actions, name, run, text, has_selection=name == "export").add_argument("archive")


def _action(
    actions: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    has_selection: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text.capitalize()}.")
    parser.add_argument("--disk", metavar="DIR", default=default_disk_path(), help="the folder (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    if has_selection:
        parser.add_argument("--model", help="only this model: its name, path, or the start of its key")
        parser.add_argument("--namespace", help="only this tenant")
    if name in ("stats", "verify", "clear"):
        parser.add_argument("--index", default="memory", help="redis:// or rediss:// URL of a shared index")
    parser.set_defaults(run=run)
    return parser


# ---- actions ----


def _stats(options: argparse.Namespace) -> int:
    models = _selected(options)
    values = {"path": options.disk, "models": [_as_json(model) for model in models]}
    with _shared_index(options) as index:
        if index is not None:
            values["shared_index"] = {"segments": index.stats().segments}
    if options.json:
        print(json.dumps(values))
        return 0
    if not models:
        print(f"Nothing is stored in {options.disk}")
        return 0
    titles = (
        "model",
        "key",
        "namespaces",
        "documents",
        "segments",
        "tokens",
        "on disk",
        "in memory",
        "hits",
        "evictions",
    )
    print_table(titles, [_row(model) for model in models])
    total = sum(model.nbytes for model in models)
    print(f"\n{bytes_text(total)} in {options.disk}")
    if "shared_index" in values:
        print(f"{values['shared_index']['segments']} segments in the shared index")
    return 0


def _verify(options: argparse.Namespace) -> int:
    from daric_rag.engine.storage.maintenance import verify

    with _shared_index(options) as index, _counting(options, "verifying") as progress:
        report = _on_each(
            options,
            lambda root: verify(options.disk, model=root, namespace=options.namespace, progress=progress),
        )
        _forget(index, report)
    if options.json:
        print(json.dumps(_removal_json(report)))
    else:
        print(
            f"{report.examined} records read, {report.removed} damaged and deleted "
            f"({bytes_text(report.removed_nbytes)})"
        )
    return 0


def _clear(options: argparse.Namespace) -> int:
    from daric_rag.engine.storage.maintenance import clear

    with _shared_index(options) as index:
        report = _on_each(options, lambda root: clear(options.disk, model=root, namespace=options.namespace))
        _forget(index, report)
    if options.json:
        print(json.dumps(_removal_json(report)))
    else:
        print(f"{report.removed} records deleted ({bytes_text(report.removed_nbytes)})")
    return 0


def _export(options: argparse.Namespace) -> int:
    from daric_rag.engine.storage.archive import export_records

    roots = _roots(options)
    if len(roots) > 1:
        raise ValueError(
            f"--model {options.model!r}: {len(roots)} entries have this name; give the key of one"
        )
    if not _selected(options):
        raise ValueError(f"{options.disk}: nothing is stored there that could be exported")
    with _counting(options, "exporting") as progress:
        report = export_records(
            options.disk, options.archive, model=roots[0], namespace=options.namespace, progress=progress
        )
    _print_transfer(options, report, "written to")
    return 0


def _import(options: argparse.Namespace) -> int:
    from daric_rag.engine.storage.archive import import_records

    with _counting(options, "importing") as progress:
        report = import_records(options.disk, options.archive, progress=progress)
    _print_transfer(options, report, "taken over from")
    return 0


# ---- selection ----


def _selected(options: argparse.Namespace) -> list[CachedModel]:
    """The stored models that `--model` and `--namespace` name. Raises `ValueError` if `--model` names none."""
    from daric_rag.engine.storage.maintenance import list_models

    models = list_models(options.disk) if os.path.isdir(options.disk) else []
    if options.model is not None:
        chosen = [model for model in models if _is_named(model, options.model)]
        if not chosen:
            known = ", ".join(sorted({_short_name(model.model_id) for model in models})) or "none"
            raise ValueError(
                f"--model {options.model!r}: no such model in {options.disk}; there are: {known}"
            )
        models = chosen
    if options.namespace is not None:
        models = [model for model in models if options.namespace in model.namespaces]
    return models


def _is_named(model: CachedModel, name: str) -> bool:
    """By the whole id, its last part, the name of an embedded model, or 8 and more digits of the key."""
    from daric_rag.engine.storage.maintenance import MIN_ROOT_PREFIX

    last = _short_name(model.model_id)
    if name == model.model_id or name == last or last.startswith(f"{name}-"):
        return True
    return len(name) >= MIN_ROOT_PREFIX and model.root.hex().startswith(name.lower())


def _short_name(model_id: str) -> str:
    return os.path.basename(model_id.rstrip("/")) or model_id


def _roots(options: argparse.Namespace) -> list[str | None]:
    """What to give to the storage's functions as `model`, one after the other; None is all."""
    return [None] if options.model is None else [model.root.hex() for model in _selected(options)]


def _on_each(options: argparse.Namespace, work: Callable[[str | None], RemovalReport]) -> RemovalReport:
    from daric_rag.engine.storage.maintenance import RemovalReport

    if not os.path.isdir(options.disk):
        return RemovalReport(0, 0, 0, ())
    reports = [work(root) for root in _roots(options)]
    return RemovalReport(
        sum(report.examined for report in reports),
        sum(report.removed for report in reports),
        sum(report.removed_nbytes for report in reports),
        tuple(key for report in reports for key in report.removed_keys),
    )


# ---- the index that several engines share ----


@contextlib.contextmanager
def _shared_index(options: argparse.Namespace) -> Iterator[KVIndex | None]:
    """The Redis index; None for `memory`, which every engine makes anew from the folder."""
    from daric_rag.engine.scheduling.index.opening import new_index, shared_disk_id

    if options.index == "memory":
        yield None
        return
    disk_id = shared_disk_id(options.disk) if os.path.isdir(options.disk) else None
    index = new_index(options.index, disk_id=disk_id)
    try:
        yield index
    finally:
        index.close()


def _forget(index: KVIndex | None, report: RemovalReport) -> None:
    from daric_rag.engine.keys import Tier

    if index is not None and report.removed_keys:
        index.remove(list(report.removed_keys), Tier.DISK)
        index.flush()


# ---- printing ----


@contextlib.contextmanager
def _counting(options: argparse.Namespace, what: str) -> Iterator[Callable[[int], None]]:
    """A bar without an end: how many records there are is known only when all were seen."""
    with progress_bar(0, what, "record", False if options.json else None) as bar:

        def progress(count: int) -> None:
            bar.update(count - bar.n)

        yield progress


def _as_json(model: CachedModel) -> dict[str, Any]:
    return {
        "model": model.model_id,
        "key": model.root.hex(),
        "namespaces": list(model.namespaces),
        "ranks": list(model.ranks),
        "documents": model.documents,
        "segments": model.records,
        "tokens": model.num_tokens,
        "disk_bytes": model.nbytes,
        "host_bytes": model.host_nbytes,
        "hits": model.hits,
        "evictions": model.evictions,
        "dtype": None if model.spec is None else model.spec.dtype,
    }


def _row(model: CachedModel) -> Sequence[str]:
    names = ", ".join(name or "(none)" for name in model.namespaces)
    counts = (str(model.documents), str(model.records), str(model.num_tokens))
    key = model.root.hex()[:_ROOT_DIGITS]
    sizes = (bytes_text(model.nbytes), bytes_text(model.host_nbytes))
    used = (str(model.hits), str(model.evictions))
    return (_short_name(model.model_id), key, names, *counts, *sizes, *used)


def _removal_json(report: RemovalReport) -> dict[str, Any]:
    return {
        "examined": report.examined,
        "removed": report.removed,
        "removed_bytes": report.removed_nbytes,
        "removed_keys": [key.hex() for key in report.removed_keys],
    }


def _print_transfer(options: argparse.Namespace, report: TransferReport, what: str) -> None:
    if options.json:
        counts = {"records": report.transferred, "bytes": report.nbytes, "present": report.present}
        print(json.dumps({**counts, "refused": list(report.refused), "archive": options.archive}))
        return
    pairs = [
        ("records", f"{report.transferred} {what} {options.archive}"),
        ("size", bytes_text(report.nbytes)),
    ]
    if report.present:
        pairs.append(("stored before", str(report.present)))
    if report.refused:
        pairs.append(("refused", f"{len(report.refused)} damaged"))
    print_pairs(pairs)
    for item in report.refused[:_REFUSED_SHOWN]:
        tell(f"refused {item}")
