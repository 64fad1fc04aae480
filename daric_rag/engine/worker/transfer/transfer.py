"""A transfer: one kind of movement over all layers, by whichever implementation the caches' device has."""

from __future__ import annotations

import functools
import warnings
from typing import Protocol

import torch

from daric_rag.engine.worker.transfer.kernels import (
    CpuKernel,
    CudaKernel,
    are_pinned,
    cpu_library,
    cuda_library,
)
from daric_rag.engine.worker.transfer.plan import Kind, RopeTable, TransferPlan
from daric_rag.engine.worker.transfer.reference import Reference
from daric_rag.engine.worker.transfer.staging import SLOTS, Staging


class Implementation(Protocol):
    """`CpuKernel`, `CudaKernel` or `Reference`, made for one kind of transfer of a plan."""

    def run(self, cache: torch.Tensor, layer: int) -> None:
        """Move `layer` of the records from or to the blocks of `cache`; rotating takes no records."""


class Transfer:
    """Moves a plan's KV layer by layer; everything is checked, and prepared, when it is made.

    - SCATTER: records into blocks, converted to the caches' dtype, keys rotated in float32 by their Δposition
    - GATHER: blocks into records, converted to the storage dtype; nothing is rotated
    - ROTATE: keys rotated where they are; ranges without a `rope_row` are left alone

    Raises ValueError if the plan has no records for this, if two of its ranges write the same slot, or if
    `rope` does not cover it. On CUDA work is enqueued on the current stream: the transfer and its records must
    outlive that. Pinned records are read where they are, all others, and what is gathered, pass through a
    buffer on the device.
    """

    def __init__(self, kind: Kind, plan: TransferPlan, rope: RopeTable | None = None) -> None:
        plan.check(kind, rope)
        self._kind = kind
        self._layers = plan.caches.layers
        make = implementation(plan, rope)
        self._staging: Staging | None = None
        staged = _must_be_staged(kind, plan, make)
        if bool(staged.any()):
            self._staging = Staging(plan.select(staged))
            self._staged = make(kind, self._staging.plan, rope)
            plan = plan.select(~staged)
        self._direct: Implementation = make(kind, plan, rope)

    @property
    def num_layers(self) -> int:
        """Layers of the caches."""
        return len(self._layers)

    def run(self, layer: int) -> None:
        """Move one layer as a whole."""
        self.move(layer)
        self.deliver(layer)

    def move(self, layer: int) -> None:
        """The part that reads or writes blocks."""
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer is {layer}, must be 0 to {self.num_layers - 1}")
        cache = self._layers[layer]
        if self._staging is not None:
            if self._kind is Kind.SCATTER:
                self._staging.fetch(layer)
            self._staged.run(cache, layer % SLOTS)
        self._direct.run(cache, layer)

    def deliver(self, layer: int) -> None:
        """The part of a GATHER that follows: from the device to the records. Another stream may do it."""
        if self._staging is not None and self._kind is Kind.GATHER:
            self._staging.deliver(layer)


_Maker = type[CpuKernel] | type[CudaKernel] | type[Reference]


def implementation(plan: TransferPlan, rope: RopeTable | None) -> _Maker:
    """What moves a plan's KV on the device of its caches."""
    if plan.caches.device.type == "cpu":
        if cpu_library() is not None:
            return CpuKernel
        _warn_once("CPU")
    elif cuda_library() is None:
        _warn_once("CUDA")
    elif CudaKernel.takes(plan, rope):
        return CudaKernel
    return Reference


def _must_be_staged(kind: Kind, plan: TransferPlan, implementation: _Maker) -> torch.Tensor:
    """Which ranges, bool [n]: on CUDA all saves, whose way over PCIe would else hold up the forward pass, and
    loads from memory that is not pinned.
    """
    staged = torch.zeros(len(plan.ranges), dtype=torch.bool)
    if implementation is not CudaKernel or kind is Kind.ROTATE:
        return staged
    if kind is Kind.GATHER:
        return ~staged
    return ~(are_pinned(plan.ranges) & (plan.ranges[:, 0] % CudaKernel.ALIGNMENT == 0))


@functools.cache
def _warn_once(kind: str) -> None:
    hint = "and nvcc on the PATH " if kind == "CUDA" else ""
    warnings.warn(
        f"The {kind} transfer kernels of daric_rag are not built: loading KV uses slower pure-torch code. "
        f"With a C++ compiler {hint}installed, run `pip install --force-reinstall --no-deps daric-rag`, "
        "or `make build-ext` in a checkout.",
        RuntimeWarning,
        stacklevel=5,
    )
