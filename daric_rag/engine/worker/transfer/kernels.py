"""The compiled transfer kernels (csrc/), loaded through their C interface.

They are built without torch headers, so one build serves every torch version and a build needs no torch. The
CPU library shares torch's OpenMP runtime, hence its threads and their binding, because both ask for
`libgomp.so.1`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from daric_rag.engine.worker.kv_layout import PackedOrder
from daric_rag.engine.worker.transfer.plan import Kind, RopeTable, TransferPlan

BASELINE_ISA, BEST_ISA = 0, 1
_VERSION = 1  # kInterface of csrc/transfer.h: a library built from other sources is not used
_DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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
_JOB, _LONG, _POINTER = ctypes.POINTER(Job), ctypes.c_int64, ctypes.c_void_p


@functools.cache
def cpu_library() -> ctypes.CDLL | None:
    """The CPU kernels, or None where they were not built or do not load."""
    return _load(
        "_C*.so",
        {
            "daric_transfer_cpu": (_JOB, _LONG, _LONG, _LONG),
            "daric_transfer_items": (_JOB, _LONG, _LONG),
        },
    )


@functools.cache
def cuda_library() -> ctypes.CDLL | None:
    """The CUDA kernels, or None where they were not built or do not load."""
    library = _load(
        "_cuda*.so",
        {
            "daric_transfer_cuda": (_JOB, _POINTER, _LONG, _LONG, ctypes.c_int, _POINTER),
            "daric_pinned": (_POINTER, _LONG, _POINTER),
            "daric_cuda_error": (),
        },
    )
    if library is not None:
        library.daric_cuda_error.restype = ctypes.c_char_p
    return library


def _load(pattern: str, functions: Mapping[str, tuple[Any, ...]]) -> ctypes.CDLL | None:
    for path in sorted(Path(__file__).parents[3].glob(pattern)):
        try:
            library = ctypes.CDLL(str(path))
            library.daric_interface.restype = _LONG
            for name, arguments in functions.items():
                getattr(library, name).argtypes = arguments
        except (OSError, AttributeError):
            continue
        if library.daric_interface() == _INTERFACE:
            return library
    return None


class _Kernel:
    """A job for one kind of transfer of a plan, which is pointed at one layer after the other."""

    def __init__(self, kind: Kind, plan: TransferPlan, rope: RopeTable | None) -> None:
        layout, device = plan.caches.layout, plan.caches.device
        tables = [plan.ranges, plan.pieces, *(() if rope is None else (rope.cos, rope.sin))]
        # The job points into these.
        self._tables = [_on_device(table, device) for table in tables]
        self._orders = layout.key_order, layout.value_order
        ranges, pieces, cos, sin = (*(table.data_ptr() for table in self._tables), 0, 0)[:4]
        self._kind = kind
        self.job = Job(
            ranges=ranges,
            pieces=pieces,
            key=_order(layout.key_order, layout.key_pattern),
            value=_order(layout.value_order, layout.value_pattern),
            cos=cos,
            sin=sin,
            num_pieces=len(plan.pieces),
            value_offset=layout.value_offset,
            num_kv_heads=layout.num_kv_heads,
            block_size=layout.block_size,
            head_dim=layout.head_dim,
            rotary_dim=0 if rope is None else rope.rotary_dim,
            neox=rope is not None and rope.neox,
            storage_dtype=_DTYPE_CODES[plan.storage_dtype],
            cache_dtype=_DTYPE_CODES[layout.dtype],
        )
        self.point_at(plan.caches.layers[0], 0)

    def point_at(self, cache: torch.Tensor, layer: int) -> None:
        """Let the job move `layer` of the records from or to `cache`."""
        self.job.cache = cache.data_ptr()
        self.job.block_stride, self.job.head_stride, _, _ = cache.stride()
        self.job.layer = layer


class CpuKernel(_Kernel):
    """Runs on torch's threads; the GIL is released meanwhile."""

    def __init__(self, kind: Kind, plan: TransferPlan, rope: RopeTable | None, isa: int = BEST_ISA) -> None:
        super().__init__(kind, plan, rope)
        library = cpu_library()
        assert library is not None
        self._run = library.daric_transfer_cpu
        self._arguments = (self.job, kind, torch.get_num_threads(), isa)

    def run(self, cache: torch.Tensor, layer: int) -> None:
        """Move one layer."""
        self.point_at(cache, layer)
        if self._run(*self._arguments):
            raise MemoryError("no memory for the scratch rows of a transfer")


class CudaKernel(_Kernel):
    """Enqueues on the current stream of the caches' device; records must be pinned, or on that device."""

    ALIGNMENT = 16

    def __init__(self, kind: Kind, plan: TransferPlan, rope: RopeTable | None) -> None:
        super().__init__(kind, plan, rope)
        self._host_ranges = plan.ranges
        self._device = plan.caches.device
        library = cuda_library()
        assert library is not None
        self._library = library

    @staticmethod
    def takes(plan: TransferPlan, rope: RopeTable | None) -> bool:
        """Whether rows can be cut into vectors of two elements at least: `pick_width` of csrc/."""
        layout, strides = plan.caches.layout, plan.caches.layers[0].stride()[:3]
        paired = rope.rotary_dim // 2 if rope is not None and rope.neox else 0
        return layout.kind == "strided" and not any(n % 2 for n in (layout.head_dim, paired, *strides))

    def run(self, cache: torch.Tensor, layer: int) -> None:
        """Enqueue one layer; raises RuntimeError with CUDA's message if that fails."""
        self.point_at(cache, layer)
        ranges, stream = self._host_ranges, torch.cuda.current_stream(self._device)
        status = self._library.daric_transfer_cuda(
            self.job, ranges.data_ptr(), len(ranges), self._kind, stream.device_index, stream.cuda_stream
        )
        if status:
            error = self._library.daric_cuda_error().decode()
            raise RuntimeError(f"the CUDA transfer kernel returned {status}: {error}")


def are_pinned(ranges: torch.Tensor) -> torch.Tensor:
    """Which records of `ranges` (int64 [n, 7]) CUDA kernels can use where they are: bool [n]."""
    library, pinned = cuda_library(), torch.zeros(len(ranges), dtype=torch.bool)
    assert library is not None
    library.daric_pinned(ranges.data_ptr(), len(ranges), pinned.data_ptr())
    return pinned


def _order(offsets: torch.Tensor, pattern: PackedOrder | None) -> _Order:
    """`daric::Order`; only the CPU kernel follows `offsets`, and only where there is no pattern."""
    if pattern is None:
        return _Order(offsets.data_ptr(), 0, 0, 0)
    return _Order(offsets.data_ptr(), pattern.tile, pattern.pair, pattern.tile_stride)


def _on_device(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The table there, without waiting for the device."""
    table = table.contiguous()
    if device.type == "cpu" or not table.numel():
        return table
    return table.pin_memory().to(device, non_blocking=True)
