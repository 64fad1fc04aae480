"""The compiled transfer kernels (csrc/), loaded through their C interface.

They are built without torch headers, so one build serves every torch version and a build needs no torch. The
CPU library shares torch's OpenMP runtime, hence its threads and their binding, because both ask for
`libgomp.so.1`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

SCATTER, GATHER, ROTATE = 0, 1, 2
_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_UNSUPPORTED_JOB = 2
BASELINE_ISA, BEST_ISA = 0, 1
_VERSION = 1  # kInterface of csrc/transfer.h: a library built from other sources is not used


class _Order(ctypes.Structure):
    _fields_ = (
        ("offsets", ctypes.c_void_p),
        ("tile", ctypes.c_int64),
        ("pair", ctypes.c_int64),
        ("tile_stride", ctypes.c_int64),
    )


class Job(ctypes.Structure):
    """`daric::Job` of csrc/transfer.h, field by field."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("pieces", ctypes.c_void_p),
        ("key", _Order),
        ("value", _Order),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("num_pieces", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("value_offset", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rotary_dim", ctypes.c_int64),
        ("neox", ctypes.c_int64),
        ("storage_dtype", ctypes.c_int64),
        ("cache_dtype", ctypes.c_int64),
    )


_INTERFACE = _VERSION * 4096 + ctypes.sizeof(Job)


def make_job(
    cache: torch.Tensor,
    ranges: torch.Tensor,
    pieces: torch.Tensor,
    key_order: torch.Tensor,
    value_order: torch.Tensor,
    key_pattern: Sequence[int],
    value_pattern: Sequence[int],
    value_offset: int,
    storage_dtype: torch.dtype,
    layer: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    neox: bool,
) -> Job:
    """Fill a Job with the arguments of an op. The tensors must outlive the kernel call."""
    _check_tables(ranges, pieces, key_order, value_order, cos, sin)
    return Job(
        cache=cache.data_ptr(),
        ranges=ranges.data_ptr(),
        pieces=pieces.data_ptr(),
        key=_Order(key_order.data_ptr(), *(key_pattern or (0, 0, 0))),
        value=_Order(value_order.data_ptr(), *(value_pattern or (0, 0, 0))),
        cos=0 if cos is None else cos.data_ptr(),
        sin=0 if sin is None else sin.data_ptr(),
        num_pieces=len(pieces),
        layer=layer,
        block_stride=cache.stride(0),
        head_stride=cache.stride(1),
        value_offset=value_offset,
        num_kv_heads=cache.shape[1],
        block_size=cache.shape[2],
        head_dim=cache.shape[3] // 2,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        neox=neox,
        storage_dtype=_DTYPE_CODES[storage_dtype],
        cache_dtype=_DTYPE_CODES[cache.dtype],
    )


def _check_tables(
    ranges: torch.Tensor,
    pieces: torch.Tensor,
    key_order: torch.Tensor,
    value_order: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Kernels read these by pointer; what the numbers in them may be was checked by `TransferPlan.build`."""
    longs, ints = (ranges, pieces), (key_order, value_order)
    floats = tuple(table for table in (cos, sin) if table is not None)
    for tables, dtype in ((longs, torch.int64), (ints, torch.int32), (floats, torch.float32)):
        for table in tables:
            if table.dtype != dtype or not table.is_contiguous():
                raise ValueError(f"a table is {table.dtype} {table.stride()}, must be contiguous {dtype}")


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The CPU kernels, or None where they were not built or do not load."""
    return _load("_C*.so")


@functools.cache
def cuda_library() -> ctypes.CDLL | None:
    """The CUDA kernels, or None where they were not built or do not load."""
    library = _load("_cuda*.so")
    if library is not None:
        library.daric_cuda_error.restype = ctypes.c_char_p
    return library


def _load(pattern: str) -> ctypes.CDLL | None:
    for path in sorted(Path(__file__).parents[3].glob(pattern)):
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            continue
        library.daric_interface.restype = ctypes.c_int64
        if library.daric_interface() == _INTERFACE:
            return library
    return None


def run_on_cpu(job: Job, op: int, isa: int = BEST_ISA) -> None:
    """Run `op` for `job` on torch's number of threads; the GIL is released meanwhile."""
    library = cpu_library()
    assert library is not None
    threads = ctypes.c_int64(torch.get_num_threads())
    if library.daric_transfer_cpu(ctypes.byref(job), ctypes.c_int64(op), threads, ctypes.c_int64(isa)):
        raise MemoryError("no memory for the scratch rows of a transfer")


def run_cuda_items_on_cpu(job: Job, num_ranges: int, op: int) -> bool:
    """Walk the CUDA kernel's work items on the CPU, for tests; False for a job that it does not take."""
    library = cpu_library()
    assert library is not None
    status = library.daric_transfer_items(ctypes.byref(job), ctypes.c_int64(num_ranges), ctypes.c_int64(op))
    return int(status) != _UNSUPPORTED_JOB


def run_on_cuda(job: Job, host_ranges: torch.Tensor, op: int, device: torch.device) -> bool:
    """Enqueue `op` for `job` on the device's current stream; False for a job that the kernels do not take.

    Raises RuntimeError with CUDA's message if the launch fails.
    """
    library = cuda_library()
    assert library is not None
    with torch.cuda.device(device):
        library.daric_cuda_set_device(ctypes.c_int(torch.cuda.current_device()))
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        status = library.daric_transfer_cuda(
            ctypes.byref(job),
            ctypes.c_void_p(host_ranges.data_ptr()),
            ctypes.c_int64(len(host_ranges)),
            ctypes.c_int64(op),
            stream,
        )
    if status not in (0, _UNSUPPORTED_JOB):
        raise RuntimeError(f"CUDA transfer kernel failed: {library.daric_cuda_error().decode()}")
    return bool(status != _UNSUPPORTED_JOB)


def are_pinned(ranges: torch.Tensor) -> bool:
    """Whether CUDA kernels can access all records of `ranges` (a host tensor) where they are."""
    library = cuda_library()
    if library is None:
        return False
    return bool(library.daric_are_pinned(ctypes.c_void_p(ranges.data_ptr()), ctypes.c_int64(len(ranges))))
