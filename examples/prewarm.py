"""A folder becomes searchable, and the KV of its documents is computed ahead of time.

    python examples/prewarm.py DIR [--to DIR]

Can be interrupted and run again: documents that are stored cost a look-up. Once all are, it does nothing.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

from daric_rag import DaricConfig, DaricEngine
from daric_rag.commands.documents import DEFAULT_SPLIT_TOKENS, Folder, read_folder, split_folder
from daric_rag.commands.library import synchronise
from daric_rag.commands.quiet import held_back_stderr, quiet_environment
from daric_rag.models import resolve_model
from daric_rag.progress import progress_bar
from daric_rag.retrieval import DocumentStore

BATCH = 32  # documents


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--to", default="prewarmed", help="where to keep index and KV (%(default)s)")
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    quiet_environment()
    try:
        folder = read_folder(options.folder)
    except ValueError as error:
        parser.error(str(error))
    target = Path(options.to)
    for file in folder.skipped:
        print(f"skipped {file.name}: {file.reason}")
    if is_done(target, folder, options.model):
        print(f"Nothing to do: {len(folder.files)} files are indexed and warm in {target}")
        return
    prewarm(folder, target, options.model)
    mark_done(target, folder, options.model)


def prewarm(folder: Folder, target: Path, model: str) -> None:
    """Split, index and warm; whatever of it was done before is not done again."""
    path = resolve_model(model)
    config = DaricConfig(disk_path=str(target / "kv"))
    with held_back_stderr():
        engine = DaricEngine(path, config)
    with engine, DocumentStore(target / "index") as store:
        documents = split_folder(
            folder, DEFAULT_SPLIT_TOKENS, lambda text: len(engine.processor.tokenize(text))
        )
        synchronise(store, documents)
        computed = 0
        with progress_bar(len(documents), "warming", "document") as bar:
            for start in range(0, len(documents), BATCH):
                batch = [document.text for document in documents[start : start + BATCH]]
                computed += engine.warm(batch, progress=False).generated_tokens
                bar.update(len(batch))
        while engine.stats()["store"]["pending_writes"]:
            time.sleep(0.05)
        print(f"{len(documents)} documents of {len(folder.files)} files; computed {computed} tokens now")
        print(f'Ask:  daric-rag ask --docs {folder.path} --disk {target / "kv"} "your question"')


def is_done(target: Path, folder: Folder, model: str) -> bool:
    """Whether exactly these texts were warmed for this model, and the KV is still there."""
    try:
        done = json.loads((target / "done.json").read_text())
    except (OSError, ValueError):
        return False
    return done == state(folder, model) and any((target / "kv").iterdir())


def mark_done(target: Path, folder: Folder, model: str) -> None:
    (target / "done.json").write_text(json.dumps(state(folder, model)))


def state(folder: Folder, model: str) -> dict[str, str]:
    texts = json.dumps([(file.name, file.text) for file in folder.files])
    return {"model": model, "texts": hashlib.blake2b(texts.encode()).hexdigest()}


if __name__ == "__main__":
    main()
