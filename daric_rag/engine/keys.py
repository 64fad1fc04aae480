"""Names of stored KV: hash chains over token ids, rooted in what makes two KV caches incompatible."""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SegmentKey = bytes
"""32 bytes: the blake2b-256 hash of a segment's parent key and token ids."""

KEY_BYTES = 32
SEGMENT_TOKENS = 256
"""Most tokens in one segment, the atomic unit of index and storage."""

_ADAPTER_CONFIG = "adapter_config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WINDOW_BYTES = 4096
_WINDOWS_PER_FILE = 256


class Tier(StrEnum):
    """Where the KV bytes of a segment lie; a segment may have a copy in both."""

    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Segment:
    """Up to `SEGMENT_TOKENS` tokens of a chunk: `[start, end)` in tokens from the chunk's beginning."""

    key: SegmentKey
    parent: SegmentKey
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Length in tokens, 1 to `SEGMENT_TOKENS`."""
        return self.end - self.start


def root_key(fields: Mapping[str, object]) -> SegmentKey:
    """Return the 32-byte key that every chunk's first segment hangs from.

    `fields` names all that makes stored KV unusable elsewhere: model, weights fingerprint, dtypes,
    tensor-parallel size, RoPE parameters, LoRA adapter, layout version, namespace, the prefix it was
    generated behind. Values are JSON values (numbers, strings, booleans, None, nested lists and mappings)
    or bytes; order does not matter.

    Raises:
        ValueError: a value has no canonical form; the message names the field.
    """
    canonical = {name: _canonical(name, value) for name, value in fields.items()}
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode("ascii"), digest_size=KEY_BYTES, person=b"daric-rag root").digest()


def segment_chain(
    root: SegmentKey, token_ids: "Sequence[int] | npt.NDArray[np.integer]"
) -> tuple[Segment, ...]:
    """Cut a chunk's token ids into segments, each keyed by its parent's key and its own tokens.

    Equal keys therefore mean equal tokens from the chunk's beginning, under the same root. Only the last
    segment may be shorter than `SEGMENT_TOKENS`; an empty chunk has no segments.

    Raises:
        ValueError: `root` is not 32 bytes, or a token id is not an integer in [0, 2**32).
    """
    if len(root) != KEY_BYTES:
        raise ValueError(f"root is {len(root)} bytes long; a key has {KEY_BYTES}")
    data = _token_bytes(token_ids)
    num_tokens = len(data) // 4
    segments = []
    parent = root
    for start in range(0, num_tokens, SEGMENT_TOKENS):
        end = min(start + SEGMENT_TOKENS, num_tokens)
        key = hashlib.blake2b(parent + data[4 * start : 4 * end], digest_size=KEY_BYTES).digest()
        segments.append(Segment(key, parent, start, end))
        parent = key
    return tuple(segments)


def model_fingerprint(path: str | os.PathLike[str]) -> str:
    """Return 64 hex digits that identify the weights in a local model directory (or of one weight file).

    Hashed are the adapter_config.json of a LoRA adapter, and of every weight file its name, size and windows of
    4 KiB: 256 evenly spaced ones, first and last bytes included, and in safetensors the beginning of every tensor
    (files up to 1 MiB whole). Reading all of many gigabytes at every start would take minutes. Weights that were
    trained, merged or edited tensor by tensor differ; a change of single rows between two windows may not be seen.
    For a hub id pass its snapshot directory.

    Raises:
        ValueError: `path` does not exist, or has no weights.
    """
    location = Path(path)
    if location.is_file():
        files = [location]
    elif location.is_dir():
        files = sorted(entry for entry in location.iterdir() if entry.is_file() and _is_hashed(entry))
    else:
        raise ValueError(f"model path {str(path)!r} does not exist; pass a local directory or weight file")
    # A configuration alone would make two fine-tunes of one model the same.
    if not any(file.name != _ADAPTER_CONFIG for file in files):
        raise ValueError(
            f"model path {str(path)!r} has no weights ({', '.join(_WEIGHT_SUFFIXES)}), so its KV cannot be told "
            "from other models'; pass the directory that holds the weight files"
        )
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"daric-rag model")
    for file in files:
        size = file.stat().st_size
        digest.update(json.dumps([file.name, size]).encode("ascii"))
        _hash_windows(digest, file, size)
    return digest.hexdigest()


def _is_hashed(file: Path) -> bool:
    return file.name == _ADAPTER_CONFIG or file.suffix in _WEIGHT_SUFFIXES


def _hash_windows(digest: "hashlib.blake2b", file: Path, size: int) -> None:
    with file.open("rb", buffering=0) as stream:
        if size <= _WINDOW_BYTES * _WINDOWS_PER_FILE:
            digest.update(stream.read())
            return
        last = size - _WINDOW_BYTES
        starts = {last * window // (_WINDOWS_PER_FILE - 1) for window in range(_WINDOWS_PER_FILE)}
        if file.suffix == ".safetensors":
            starts.update(min(start, last) for start in _tensor_starts(stream))
        for start in sorted(starts):
            stream.seek(start)
            digest.update(stream.read(_WINDOW_BYTES))


def _tensor_starts(stream: FileIO) -> list[int]:
    """Where the tensors of a safetensors file begin; none if it is damaged, which is for vLLM to say."""
    try:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return [8 + length + int(tensor["data_offsets"][0]) for tensor in tensors]
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        return []


def _token_bytes(token_ids: "Sequence[int] | npt.NDArray[np.integer]") -> bytes:
    """Token ids as little-endian 32-bit integers. What a caller wrote was checked when the prompt was made."""
    values = token_ids if isinstance(token_ids, Sequence) else token_ids.tolist()
    try:
        return struct.pack(f"<{len(values)}I", *values)
    except struct.error as error:
        raise ValueError(f"token_ids holds something other than integers in [0, 2**32): {error}") from None


def _canonical(name: str, value: object) -> object:
    """The value with bytes marked as such and containers checked, so that unequal values never look equal."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError(f"{name} is {value!r}; a root key needs finite numbers")
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list | tuple):
        return [_canonical(f"{name}[{position}]", item) for position, item in enumerate(value)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} has a key that is not a string: {value!r}")
        return {key: _canonical(f"{name}.{key}", item) for key, item in value.items()}
    raise ValueError(f"{name} is {type(value).__name__} {value!r}; allowed are JSON values and bytes")
