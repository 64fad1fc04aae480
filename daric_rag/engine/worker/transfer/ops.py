"""Moving KV between canonical records in host memory and the paged blocks of one layer.

Three ops, `daric_rag::scatter_kv`, `gather_kv` and `rotate_kv`: pure torch by default, compiled kernels on
CPU and CUDA where they were built. `scatter_`, `gather_` and `rotate_` check that everything fits and call
them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from daric_rag.engine.worker.kv_layout import KVLayout, PackedOrder
from daric_rag.engine.worker.transfer import kernels, reference
from daric_rag.engine.worker.transfer.plan import (
    NO_RECORD,
    NO_ROTATION,
    RopeTable,
    TransferPlan,
    TransferRange,
)

__all__ = [
    "NO_RECORD",
    "NO_ROTATION",
    "RopeTable",
    "TransferPlan",
    "TransferRange",
    "gather_",
    "rotate_",
    "scatter_",
]

_PLAN = "Tensor ranges, Tensor device_ranges, Tensor pieces"
_LAYOUT = "Tensor key_order, Tensor value_order, int[] key_pattern, int[] value_pattern, int value_offset"
_RECORD = "ScalarType storage_dtype, int layer"
_ROPE = "Tensor? cos, Tensor? sin, bool neox"
_SCHEMAS = {
    "scatter_kv": f"(Tensor(a!) cache, {_PLAN}, {_LAYOUT}, {_RECORD}, {_ROPE}) -> ()",
    "gather_kv": f"(Tensor cache, {_PLAN}, {_LAYOUT}, {_RECORD}) -> ()",
    "rotate_kv": f"(Tensor(a!) cache, {_PLAN}, Tensor key_order, int[] key_pattern, {_ROPE}) -> ()",
}
OP_CODES = {"scatter_kv": kernels.SCATTER, "gather_kv": kernels.GATHER, "rotate_kv": kernels.ROTATE}
_library: Any = torch.library.Library("daric_rag", "FRAGMENT")  # type: ignore[no-untyped-call]


def scatter_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Write layer `layer` of the plan's records into the blocks of `cache`, keys rotated by their Δposition.

    Storage dtype is converted to the cache's; the rotation is computed in float32. On CUDA it is enqueued on
    the current stream. Raises ValueError if the cache, layer or rope table do not fit the plan, or two ranges
    write the same slot.
    """
    _check(cache, layout, plan, layer, reads_records=True)
    _check_writes(layout, plan, rope)
    torch.ops.daric_rag.scatter_kv(*op_arguments("scatter_kv", cache, layout, plan, layer, rope))


def gather_(cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int) -> None:
    """Read layer `layer` of the plan's records out of the blocks of `cache`, converted to the storage dtype.

    Nothing is rotated: `rope_row` is ignored. On CUDA it is enqueued on the current stream: records may be
    read once that has passed. Raises ValueError if the cache or layer do not fit the plan.
    """
    _check(cache, layout, plan, layer, reads_records=True)
    torch.ops.daric_rag.gather_kv(*op_arguments("gather_kv", cache, layout, plan, layer, None))


def rotate_(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> None:
    """Rotate the keys covered by the plan in place; records and ranges without a `rope_row` are left alone.

    Raises ValueError if the cache or rope table do not fit the plan, or two ranges rotate the same slot.
    """
    _check(cache, layout, plan, layer, reads_records=False)
    _check_writes(layout, plan, rope)
    if plan.rope_rows > 0:
        torch.ops.daric_rag.rotate_kv(*op_arguments("rotate_kv", cache, layout, plan, layer, rope))


def op_arguments(
    name: str, cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, rope: RopeTable | None
) -> tuple[Any, ...]:
    """The arguments of the op `name`, in the order of its schema; nothing is checked."""
    key_order, value_order = layout.orders_on(cache.device)
    key_pattern, value_pattern = _pattern(layout.key_pattern), _pattern(layout.value_pattern)
    rope_arguments: tuple[Any, ...] = (None, None, False)
    if rope is not None and plan.rope_rows > 0:
        rope_arguments = (*rope.on(cache.device), rope.neox)
    start = (cache, plan.ranges, *plan.on(cache.device))
    if name == "rotate_kv":
        return (*start, key_order, key_pattern, *rope_arguments)
    areas = (key_order, value_order, key_pattern, value_pattern, layout.value_offset)
    record = (plan.storage_dtype, layer)
    return (*start, *areas, *record, *rope_arguments) if name == "scatter_kv" else (*start, *areas, *record)


def _check(
    cache: torch.Tensor, layout: KVLayout, plan: TransferPlan, layer: int, *, reads_records: bool
) -> None:
    """The checks that `TransferPlan.build` could not make; constant time."""
    layout.check_cache(cache, plan.num_blocks)
    if plan.block_size != layout.block_size:
        raise ValueError(
            f"plan was built for block_size {plan.block_size}, the layout has {layout.block_size}"
        )
    if not 0 <= layer < plan.num_layers:
        raise ValueError(f"layer is {layer}, must be 0 to {plan.num_layers - 1}")
    if reads_records and not plan.has_records:
        raise ValueError("a range has record_address 0; only rotate_ works without records")


def _check_writes(layout: KVLayout, plan: TransferPlan, rope: RopeTable | None) -> None:
    if not plan.destinations_disjoint:
        raise ValueError("two ranges of the plan write the same slot of a block")
    if plan.rope_rows == 0:
        return
    rows = 0 if rope is None else rope.cos.shape[0]
    if rope is None or rows < plan.rope_rows:
        raise ValueError(f"rope has {rows} rows, the plan needs {plan.rope_rows}")
    if rope.rotary_dim > layout.head_dim:
        raise ValueError(f"rope.rotary_dim is {rope.rotary_dim}, must be at most head_dim {layout.head_dim}")


def _pattern(pattern: PackedOrder | None) -> list[int]:
    return [] if pattern is None else [pattern.tile, pattern.pair, pattern.tile_stride]


def _run_on_cpu(name: str, *arguments: Any) -> None:
    """The CPU implementation of an op: the compiled kernel, or pure torch with one warning."""
    if kernels.cpu_library() is None:
        _warn_once("CPU")
        getattr(reference, name)(*arguments)
        return
    kernels.run_on_cpu(make_job(name, *arguments), OP_CODES[name])


def _run_on_cuda(name: str, *arguments: Any) -> None:
    """The CUDA implementation of an op; pure torch also for records that are not pinned (read from disk)."""
    cache, host_ranges = arguments[:2]
    if kernels.cuda_library() is None:
        _warn_once("CUDA")
    elif name == "rotate_kv" or kernels.are_pinned(host_ranges):
        job = make_job(name, *arguments)
        if kernels.run_on_cuda(job, host_ranges, OP_CODES[name], cache.device):
            return
    getattr(reference, name)(*arguments)


def make_job(name: str, *arguments: Any) -> kernels.Job:
    """The kernels' view of the arguments of op `name`; parts that the op does not have are filled in."""
    cache, _, device_ranges, pieces, *rest = arguments
    no_rope = (None, None, False)
    if name == "rotate_kv":
        order, pattern, *rope = rest
        rest = [order, order, pattern, pattern, 0, cache.dtype, 0, *rope]
    elif name == "gather_kv":
        rest = [*rest, *no_rope]
    return kernels.make_job(cache, device_ranges, pieces, *rest)


_warned: set[str] = set()


def _warn_once(kind: str) -> None:
    if kind in _warned:
        return
    _warned.add(kind)
    hint = "and nvcc on the PATH " if kind == "CUDA" else ""
    warnings.warn(
        f"The {kind} transfer kernels of daric_rag are not built: loading KV uses slower pure-torch code. "
        f"With a C++ compiler {hint}installed, run `pip install --force-reinstall --no-deps daric-rag`, "
        "or `make build-ext` in a checkout.",
        RuntimeWarning,
        stacklevel=4,
    )


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        _library.define(name + schema)
        _library.impl(name, getattr(reference, name), "CompositeExplicitAutograd")
        _library.impl(name, _bound(_run_on_cpu, name), "CPU")
        _library.impl(name, _bound(_run_on_cuda, name), "CUDA")


def _bound(implementation: Any, name: str) -> Any:
    def call(*arguments: Any) -> None:
        implementation(name, *arguments)

    return call


_register()
