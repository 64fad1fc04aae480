"""One preallocated block of host memory, and the first-fit allocator that cuts records out of it."""

from __future__ import annotations

import bisect
import contextlib
import mmap
from typing import Any

import numpy as np

from daric_rag.engine.storage.base import Bytes
from daric_rag.errors import CacheUnavailableError

ALIGNMENT = 64
MAP_NORESERVE = 0x4000  # Linux; not in Python's mmap module before 3.13


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of records."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class FreeList:
    """First-fit allocation of `[0, size)` in units of `ALIGNMENT`, neighbours coalesced on release."""

    def __init__(self, size: int) -> None:
        self.size = size // ALIGNMENT * ALIGNMENT
        self.free_bytes = self.size
        self._starts: list[int] = [0] if self.size else []
        self._sizes: dict[int, int] = {0: self.size} if self.size else {}
        self._largest = self.size  # upper bound of the largest hole: most failing requests need no scan

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a hole of `nbytes`, or None when no hole is large enough."""
        nbytes = aligned(nbytes)
        if nbytes > self._largest:
            return None
        for index, start in enumerate(self._starts):
            hole = self._sizes[start]
            if hole >= nbytes:
                self._take(index, start, hole, nbytes)
                return start
        self._largest = max(self._sizes.values(), default=0)
        return None

    def _take(self, index: int, start: int, hole: int, nbytes: int) -> None:
        del self._sizes[start]
        if hole == nbytes:
            del self._starts[index]
        else:
            self._starts[index] = start + nbytes
            self._sizes[start + nbytes] = hole - nbytes
        self.free_bytes -= nbytes

    def release(self, start: int, nbytes: int) -> None:
        """Give back what `allocate(nbytes)` returned."""
        nbytes = aligned(nbytes)
        self.free_bytes += nbytes
        index = bisect.bisect_left(self._starts, start)
        if index < len(self._starts) and self._starts[index] == start + nbytes:
            nbytes += self._sizes.pop(self._starts.pop(index))
        if index and self._starts[index - 1] + self._sizes[self._starts[index - 1]] == start:
            start = self._starts[index - 1]
            nbytes += self._sizes[start]
        else:
            self._starts.insert(index, start)
        self._sizes[start] = nbytes
        self._largest = max(self._largest, nbytes)


class Arena:
    """`nbytes` of anonymous memory, page-locked for CUDA if `pin_memory`; else unused pages cost nothing."""

    def __init__(self, nbytes: int, *, pin_memory: bool = False) -> None:
        self.free_list = FreeList(nbytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, max(self.free_list.size, mmap.PAGESIZE), flags=flags)
        except (OSError, OverflowError) as error:
            raise CacheUnavailableError(
                f"host_bytes={nbytes}: this much memory cannot be mapped ({error})"
            ) from error
        with contextlib.suppress(OSError, AttributeError):  # fewer page faults; the kernel may not offer it
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._pinned = False
        if pin_memory:
            self._pin()

    def view(self, offset: int, nbytes: int) -> Bytes:
        """The bytes `[offset, offset + nbytes)`."""
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Unlock the pages; the memory itself goes when the last view of it does."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self._bytes.ctypes.data)
            self._pinned = False

    def _pin(self) -> None:
        error = int(_cuda_runtime().cudaHostRegister(self._bytes.ctypes.data, self._bytes.nbytes, 0))
        if error:
            raise CacheUnavailableError(
                f"host_bytes={self._bytes.nbytes}: cudaHostRegister failed with error {error}; "
                "lower host_bytes or raise the locked-memory limit (ulimit -l)"
            )
        self._pinned = True


def _cuda_runtime() -> Any:
    import torch

    if not torch.cuda.is_available():
        raise CacheUnavailableError("pin_memory=True: no CUDA device is available, use pin_memory=False")
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
