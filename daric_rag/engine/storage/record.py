"""The file format of one segment: a header that nothing in it is believed without, then the payload."""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from daric_rag.engine.keys import KEY_BYTES, SEGMENT_TOKENS, SegmentKey
from daric_rag.engine.storage.base import Bytes, RecordSpec

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"DARICKV\0"
VERSION = 1
SUFFIX = ".kv"
PAGE = 4096
MAX_LAYERS = 4096
MAX_PAYLOAD_NBYTES = 1 << 34
NAMESPACE_BYTES = 16

# magic, version, header_nbytes, root, key, parent, namespace, dtype, num_layers, num_kv_heads, head_dim,
# num_tokens, payload_nbytes; then one checksum a layer, zeros, and the checksum of all that
_FIELDS = struct.Struct(f"<8sII{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{NAMESPACE_BYTES}s16sIIIIQ")
_CHECKSUM = struct.Struct("<Q")
_NO_PARENT = bytes(KEY_BYTES)


class DamagedRecordError(Exception):
    """A file is not the record it should be, and in what; never reaches a caller of `KVStore`."""


def namespace_digest(namespace: str) -> bytes:
    """What stands for a tenant's namespace in a header."""
    return hashlib.blake2b(namespace.encode(), digest_size=NAMESPACE_BYTES).digest()


def checksum(data: Buffer) -> int:
    """XXH3-64: finds damage at memory speed (zlib.crc32 and blake3 cost several times as much)."""
    return xxhash.xxh3_64_intdigest(data)


def layer_checksums(spec: RecordSpec, num_tokens: int, payload: Bytes) -> tuple[int, ...]:
    """One checksum a layer, so that a reader can use a layer before the rest has arrived."""
    step = spec.layer_nbytes(num_tokens)
    return tuple(checksum(payload[start : start + step].data) for start in range(0, payload.nbytes, step))


def header_nbytes(num_layers: int) -> int:
    """Length of a header: whole pages, so that the payload can be read past the page cache."""
    return -(-(_FIELDS.size + (num_layers + 1) * _CHECKSUM.size) // PAGE) * PAGE


@dataclass(frozen=True)
class RecordHeader:
    """Everything a file says about its payload."""

    root: bytes
    key: SegmentKey
    parent: SegmentKey
    namespace: bytes
    spec: RecordSpec
    num_tokens: int
    checksums: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        """Where the payload starts in the file."""
        return header_nbytes(self.spec.num_layers)

    @property
    def file_nbytes(self) -> int:
        """Size of the whole file."""
        return self.payload_offset + self.spec.payload_nbytes(self.num_tokens)

    def pack(self) -> bytes:
        """The header's bytes."""
        spec = self.spec
        fields = _FIELDS.pack(
            MAGIC,
            VERSION,
            self.payload_offset,
            self.root,
            self.key,
            self.parent or _NO_PARENT,
            self.namespace,
            spec.dtype.encode("ascii"),
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            self.num_tokens,
            spec.payload_nbytes(self.num_tokens),
        )
        body = fields + struct.pack(f"<{len(self.checksums)}Q", *self.checksums)
        body += bytes(self.payload_offset - _CHECKSUM.size - len(body))
        return body + _CHECKSUM.pack(checksum(body))


def parse_header(data: bytes, file_nbytes: int) -> RecordHeader:
    """The header at the start of `data` (at least `announced_header_nbytes` long), every field checked.

    Raises `DamagedRecordError` naming the first field that cannot be right.
    """
    length = announced_header_nbytes(data)
    if len(data) < length:
        raise DamagedRecordError(f"{len(data)} bytes of a header of {length}")
    body = data[: length - _CHECKSUM.size]
    if _CHECKSUM.unpack_from(data, len(body))[0] != checksum(body):
        raise DamagedRecordError("header checksum differs")
    _, _, _, root, key, parent, namespace, dtype, *sizes, payload = _FIELDS.unpack_from(data)
    num_layers, num_kv_heads, head_dim, num_tokens = sizes
    try:
        spec = RecordSpec(num_layers, num_kv_heads, head_dim, dtype.rstrip(b"\0").decode("ascii"))
    except ValueError as error:
        raise DamagedRecordError(str(error)) from error
    if not 1 <= num_tokens <= SEGMENT_TOKENS:
        raise DamagedRecordError(f"num_tokens={num_tokens}")
    checksums = struct.unpack_from(f"<{num_layers}Q", data, _FIELDS.size)
    header = RecordHeader(
        root, key, b"" if parent == _NO_PARENT else parent, namespace, spec, num_tokens, checksums
    )
    if (
        payload > MAX_PAYLOAD_NBYTES
        or payload != spec.payload_nbytes(num_tokens)
        or file_nbytes != header.file_nbytes
    ):
        raise DamagedRecordError(f"payload of {payload} bytes in a file of {file_nbytes}")
    return header


def announced_header_nbytes(data: bytes) -> int:
    """Length of the header whose beginning is in `data`, refused unless the layer count agrees."""
    if len(data) < _FIELDS.size:
        raise DamagedRecordError(f"{len(data)} bytes, too short for a header")
    magic, version, length, *_, num_layers, _, _, _, _ = _FIELDS.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise DamagedRecordError(f"magic {magic!r}, version {version}")
    if not 1 <= num_layers <= MAX_LAYERS or length != header_nbytes(num_layers):
        raise DamagedRecordError(f"header_nbytes={length} with num_layers={num_layers}")
    return int(length)


def open_record(path: str) -> int:
    """A file descriptor for reading `path`, which must be a plain file: never a link, a pipe, a device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedRecordError("not a regular file")
    return fd


def read_header(fd: int) -> RecordHeader:
    """The header of an open record. Raises `DamagedRecordError`, `OSError`."""
    data = os.pread(fd, PAGE, 0)
    length = announced_header_nbytes(data)
    if length > len(data):
        data += os.pread(fd, length - len(data), len(data))
    return parse_header(data, os.fstat(fd).st_size)


def read_layers(fd: int, header: RecordHeader, first: int, count: int, payload: Bytes) -> None:
    """Read layers `[first, first + count)` into their place in `payload` and verify them there.

    Reading into memory of our own, not mapping the file: a mapped file that someone truncates kills the
    process with SIGBUS, and one that someone overwrites changes after it was verified.
    Raises `DamagedRecordError`, `OSError`.
    """
    step = header.spec.layer_nbytes(header.num_tokens)
    start, end = first * step, (first + count) * step
    _read_exactly(fd, header.payload_offset + start, payload[start:end])
    for layer in range(first, first + count):
        if checksum(payload[layer * step : (layer + 1) * step].data) != header.checksums[layer]:
            raise DamagedRecordError(f"checksum of layer {layer} differs")


def check_layer(fd: int, header: RecordHeader, layer: int, buffer: Bytes) -> None:
    """Read one layer into `buffer` of its size, and verify it. Raises `DamagedRecordError`, `OSError`."""
    _read_exactly(fd, header.payload_offset + layer * buffer.nbytes, buffer)
    if checksum(buffer.data) != header.checksums[layer]:
        raise DamagedRecordError(f"checksum of layer {layer} differs")


def _read_exactly(fd: int, offset: int, buffer: Bytes) -> None:
    filled = 0
    while filled < buffer.nbytes:
        got = os.preadv(fd, [buffer[filled:].data], offset + filled)
        if not got:
            raise DamagedRecordError(f"file ends at byte {offset + filled}")
        filled += got


def write_all(fd: int, header: bytes, payload: Bytes) -> None:
    """Write a whole record to a new file and see it safely on the device."""
    for part in (memoryview(header), payload.data):
        while len(part):
            part = part[os.write(fd, part) :]
    os.fsync(fd)
