"""A warmed set as one file: export to and import from an uncompressed tar archive."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tarfile
from dataclasses import dataclass
from typing import IO

import numpy as np

from daric_rag.engine.storage.directory import load_header, record_path, write_record
from daric_rag.engine.storage.maintenance import Progress, StoredRecord, select_records, verify_file
from daric_rag.engine.storage.manifest import (
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    Manifest,
    parse_manifest,
    read_manifest,
    update_manifest,
)
from daric_rag.engine.storage.record import (
    PAGE,
    DamagedRecordError,
    RecordHeader,
    announced_header_nbytes,
    layer_checksums,
    open_record,
    parse_header,
)

_RECORD_MEMBER = re.compile(r"([0-9a-f]{64})/(\d{1,4})/([0-9a-f]{64})\.kv")
_MANIFEST_MEMBER = re.compile(rf"([0-9a-f]{{64}})/{re.escape(MANIFEST)}")


@dataclass(frozen=True)
class TransferReport:
    """`transferred` records of `nbytes` bytes; `present` were there before; `refused` is damaged."""

    transferred: int
    nbytes: int
    present: int
    refused: tuple[str, ...]


def export_records(
    path: str,
    archive: str,
    *,
    model: str | None = None,
    namespace: str | None = None,
    progress: Progress | None = None,
) -> TransferReport:
    """Write the selected records, verified, into one archive, which appears whole or not at all.

    Raises `OSError` if the archive cannot be written.
    """
    transferred, nbytes, refused = 0, 0, []
    roots: set[bytes] = set()
    temporary = f"{archive}.{os.getpid()}.tmp"
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as tar:
            for record in select_records(path, model=model, namespace=namespace):
                if record.root not in roots:
                    roots.add(record.root)
                    _add_manifest(tar, path, record.root)
                if _add_record(tar, record):
                    transferred += 1
                    nbytes += record.file.nbytes
                else:
                    refused.append(record.file.key.hex())
                if progress is not None:
                    progress(transferred + len(refused))
        os.replace(temporary, archive)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return TransferReport(transferred, nbytes, 0, tuple(refused))


def import_records(path: str, archive: str, *, progress: Progress | None = None) -> TransferReport:
    """Take over the records of an archive whose name, header and every checksum are right; nothing else.

    Checksums find damage, not malice: an archive is to be trusted as much as the machine that wrote it.
    Raises `ValueError` if the file is no archive, `OSError` if the directory cannot be written.
    """
    transferred, nbytes, present, refused = 0, 0, 0, []
    size = os.path.getsize(archive)
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                if _is_manifest(member):
                    _take_manifest(path, tar, member)
                    continue
                try:
                    written = _take_record(path, tar, member, size)
                except DamagedRecordError as error:
                    refused.append(f"{member.name!r}: {error}")
                    continue
                transferred += written > 0
                present += written == 0
                nbytes += written
                if progress is not None:
                    progress(transferred + present)
    except tarfile.TarError as error:
        raise ValueError(
            f"archive={archive!r}: not an uncompressed tar archive, or cut off ({error})"
        ) from error
    return TransferReport(transferred, nbytes, present, tuple(refused))


def _add_manifest(tar: tarfile.TarFile, path: str, root: bytes) -> None:
    data = json.dumps(read_manifest(path, root).to_json()).encode()
    member = tarfile.TarInfo(f"{root.hex()}/{MANIFEST}")
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _add_record(tar: tarfile.TarFile, record: StoredRecord) -> bool:
    try:
        if record.header is None:
            return False
        verify_file(record)
        fd = open_record(record.file.path)
    except (OSError, DamagedRecordError):
        return False
    with os.fdopen(fd, "rb") as file:
        member = tarfile.TarInfo(f"{record.root.hex()}/{record.rank}/{record.file.key.hex()}.kv")
        member.size = record.header.file_nbytes
        tar.addfile(member, file)
    return True


def _is_manifest(member: tarfile.TarInfo) -> bool:
    return bool(_MANIFEST_MEMBER.fullmatch(member.name)) and member.isreg() and member.sparse is None


def _take_manifest(path: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    file = tar.extractfile(member)
    if file is None or member.size > MAX_MANIFEST_NBYTES:
        return
    root = bytes.fromhex(member.name.partition("/")[0])
    known = read_manifest(path, root)
    brought = parse_manifest(root, file.read(member.size))
    if known == Manifest(root):
        known = brought
    namespaces = {**brought.namespaces, **known.namespaces}
    update_manifest(path, Manifest(root, known.model_id, known.spec, namespaces))


def _take_record(path: str, tar: tarfile.TarFile, member: tarfile.TarInfo, archive_nbytes: int) -> int:
    """Bytes written, 0 if the record was there. Raises `DamagedRecordError`."""
    match = _RECORD_MEMBER.fullmatch(member.name)
    if not match or not member.isreg() or member.sparse is not None:
        raise DamagedRecordError("not the name of a record, or not a plain file")
    if member.offset_data + member.size > archive_nbytes:
        raise DamagedRecordError(f"{member.size} bytes announced, more than the archive has")
    root, rank, key = bytes.fromhex(match[1]), int(match[2]), bytes.fromhex(match[3])
    if load_header(record_path(path, root, rank, key), root, key) is not None:
        return 0
    file = tar.extractfile(member)
    assert file is not None
    header = _read_member_header(file, member.size)
    if header.root != root or header.key != key:
        raise DamagedRecordError("key or root differs from the name")
    spec = read_manifest(path, root).spec
    if spec is not None and spec != header.spec:
        raise DamagedRecordError(f"{header.spec}, not {spec}")
    payload = np.frombuffer(file.read(header.spec.payload_nbytes(header.num_tokens)), dtype=np.uint8)
    if layer_checksums(header.spec, header.num_tokens, payload) != header.checksums:
        raise DamagedRecordError("payload checksum differs")
    write_record(path, rank, header, payload)
    return header.file_nbytes


def _read_member_header(file: IO[bytes], nbytes: int) -> RecordHeader:
    data = file.read(PAGE)
    length = announced_header_nbytes(data)
    data += file.read(max(0, length - len(data)))
    return parse_header(data, nbytes)
