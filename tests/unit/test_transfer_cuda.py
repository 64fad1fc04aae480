"""The CUDA kernels and the side stream where there is a GPU; test_transfer.py covers the rest on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from daric_rag.engine.worker.kv_layout import gpu_layout
from daric_rag.engine.worker.transfer import kernels
from daric_rag.engine.worker.transfer import ops as transfer
from daric_rag.engine.worker.transfer.layer_stream import LayerStream
from daric_rag.engine.worker.transfer.ops import RopeTable, TransferPlan, TransferRange

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 2, 12, 16, 4, 64

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_kernels = pytest.mark.skipif(
    kernels.cuda_library() is None, reason="the CUDA kernels are not built (needs nvcc and a CUDA torch)"
)


def make_cache(dtype: torch.dtype, device: str, nhd: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_DIM) if nhd else (BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    cache = torch.randn(shape, generator=generator).to(device, dtype)
    return cache.permute(0, 2, 1, 3) if nhd else cache


def make_plan(record: torch.Tensor, cache: torch.Tensor) -> TransferPlan:
    tokens = record.shape[2]
    ranges = [
        TransferRange(record.data_ptr(), tokens, 3, 40, 5, 0, 0),
        TransferRange(record.data_ptr(), tokens, 50, 30, 64, 0, 1),
    ]
    return TransferPlan.build(
        ranges,
        [7, 2, 9, 4, 1, 0],
        layout=gpu_layout(cache),
        num_blocks=BLOCKS,
        num_layers=LAYERS,
        storage_dtype=record.dtype,
    )


@needs_gpu
@pytest.mark.parametrize("pinned", [pytest.param(True, marks=needs_kernels), False])
@pytest.mark.parametrize("nhd", [True, False])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_does_what_the_cpu_does(
    dtype: torch.dtype, storage: torch.dtype, neox: bool, nhd: bool, pinned: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    record = torch.randn(LAYERS, 2, 80, HEADS, HEAD_DIM, generator=generator).to(storage)
    record = record.pin_memory() if pinned else record
    angles = torch.rand(2, HEAD_DIM // 2, generator=generator) * 2 * math.pi
    rope = RopeTable(angles.cos(), angles.sin(), HEAD_DIM, neox)
    caches = [make_cache(dtype, device, nhd) for device in ("cpu", "cuda")]
    for cache in caches:
        plan, layout = make_plan(record, cache), gpu_layout(cache)
        transfer.scatter_(cache, layout, plan, 1, rope)
        transfer.rotate_(cache, layout, plan, 1, rope)
    assert torch.equal(caches[0], caches[1].cpu())
    out = torch.zeros_like(record, pin_memory=pinned)
    transfer.gather_(caches[1], gpu_layout(caches[1]), make_plan(out, caches[1]), 0)
    torch.cuda.synchronize()
    expected = torch.zeros_like(record)
    transfer.gather_(caches[0], gpu_layout(caches[0]), make_plan(expected, caches[0]), 0)
    assert torch.equal(out, expected)


@needs_gpu
def test_the_computing_stream_waits_for_a_layer_of_the_side_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    stream, target = LayerStream(device), torch.zeros(1, device=device)
    stream.begin()

    def slow_write() -> None:
        torch.cuda._sleep(50_000_000)
        target.fill_(3.0)

    stream.submit(0, slow_write)
    stream.wait(0)
    seen = target.clone()
    stream.synchronize()
    assert seen.item() == 3.0


def test_on_the_cpu_a_layer_is_done_when_it_was_submitted() -> None:
    stream, done = LayerStream(torch.device("cpu")), []
    stream.begin()
    stream.submit(4, lambda: done.append(4))
    assert done == [4]
    stream.wait(4)
    stream.wait(5)
    stream.synchronize()
