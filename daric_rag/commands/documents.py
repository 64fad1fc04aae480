"""A folder of text files as documents: reading, skipping what is not text, splitting what is long."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_BYTES = 64 << 20
DEFAULT_SPLIT_TOKENS = 512
_SEPARATORS = ("\n\n", "\n", ". ", " ")

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class TextFile:
    """A file that was read; `name` is its path below the folder, with slashes."""

    name: str
    text: str


@dataclass(frozen=True)
class SkippedFile:
    """A file that was not read, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Folder:
    """The texts of a folder, in the order of their names."""

    path: Path
    files: tuple[TextFile, ...]
    skipped: tuple[SkippedFile, ...]


@dataclass(frozen=True)
class Document:
    """A file, or a part of one that is too long for one chunk; `part` counts from 1."""

    file: str
    part: int
    text: str

    @property
    def id(self) -> str:
        """Unique within a folder, the same every time."""
        return self.file if self.part == 1 else f"{self.file}#{self.part}"


def read_folder(path: str) -> Folder:
    """Read every UTF-8 text file below `path`; hidden files and folders are left out.

    Raises `ValueError` if `path` is no folder, or if no file in it can be used.
    """
    folder = Path(path)
    if not folder.exists():
        raise ValueError(f"{path}: there is no such folder")
    if not folder.is_dir():
        raise ValueError(f"{path}: is not a folder")
    files: list[TextFile] = []
    skipped: list[SkippedFile] = []
    for file in _files_below(folder):
        name = os.fsencode(file.relative_to(folder)).decode(errors="replace")
        try:
            files.append(TextFile(name, _read_text(file)))
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            skipped.append(SkippedFile(name, reason))
    if not files and not skipped:
        raise ValueError(f"{path}: there are no files in this folder")
    if not files:
        raise ValueError(f"{path}: none of the {len(skipped)} files in this folder is readable text")
    return Folder(folder, tuple(files), tuple(skipped))


def split_folder(folder: Folder, max_tokens: int, count: CountTokens) -> list[Document]:
    """The documents of a folder, none longer than `max_tokens`; a file that fits is one document as it is."""
    return [
        Document(file.name, part, text)
        for file in folder.files
        for part, text in enumerate(split_text(file.text, max_tokens, count), start=1)
    ]


def split_text(text: str, max_tokens: int, count: CountTokens) -> list[str]:
    """Cut a text at paragraphs, else lines, sentences, words, characters, into parts of `max_tokens` at most.

    A text that fits is returned unchanged; of others, white space at the cuts is dropped.
    Raises `ValueError` for `max_tokens` below 8: one character may be several tokens.
    """
    if max_tokens < 8:
        raise ValueError(f"max_tokens={max_tokens}: must be at least 8")
    if count(text) <= max_tokens or len(text) == 1:
        return [text]
    parts = _packed(_pieces(text), max_tokens, count)
    if len(parts) == 1:
        # Together they are more tokens than the sum of them.
        parts = _halves(text)
    # A piece may be too long itself.
    return [part for long in parts if long.strip() for part in split_text(long.strip(), max_tokens, count)]


def _packed(pieces: list[str], max_tokens: int, count: CountTokens) -> list[str]:
    """Neighbouring pieces together, as long as the sum of their tokens allows."""
    parts: list[str] = []
    current, size = "", 0
    for piece in pieces:
        tokens = count(piece)
        if current and size + tokens > max_tokens:
            parts.append(current)
            current, size = "", 0
        current, size = current + piece, size + tokens
    return [*parts, current]


def _pieces(text: str) -> list[str]:
    """The text at its coarsest separator, which stays at the end of a piece; halves if it has none."""
    for separator in _SEPARATORS:
        if separator in text:
            *first, last = text.split(separator)
            return [piece + separator for piece in first] + [last]
    return _halves(text)


def _halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [text[:middle], text[middle:]]


def _files_below(folder: Path) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(folder):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(directory, name)


def _read_text(file: Path) -> str:
    """Raises `OSError`, or `ValueError` saying why this is no text."""
    status = file.stat()
    if not file.is_file():  # reading a pipe would never end
        raise ValueError("not a regular file")
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    data = file.read_bytes()
    if b"\0" in data:
        raise ValueError("binary")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("binary, or not UTF-8 text") from None
    if not text.strip():
        raise ValueError("empty")
    return text.replace("\r\n", "\n")
