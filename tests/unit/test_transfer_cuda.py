"""Transfers on a GPU, which `scripts/gpu-check` runs; on the CPU test_transfer.py and test_transfer_streams.py."""

from __future__ import annotations

import math

import pytest
import torch

from daric_rag.engine.worker.kv_layout import KVCaches, gpu_layout
from daric_rag.engine.worker.transfer import (
    Kind,
    LayerStream,
    RopeTable,
    Transfer,
    TransferPlan,
    TransferRange,
    kernels,
)

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 3, 12, 16, 4, 64

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
needs_kernels = pytest.mark.skipif(
    kernels.cuda_library() is None, reason="the CUDA kernels are not built (needs nvcc and a CUDA torch)"
)


def make_caches(dtype: torch.dtype, device: str, nhd: bool) -> KVCaches:
    generator = torch.Generator().manual_seed(1)
    shape = (BLOCKS, BLOCK_SIZE, HEADS, 2 * HEAD_DIM) if nhd else (BLOCKS, HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
    layers = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(LAYERS)]
    layers = [layer.permute(0, 2, 1, 3) if nhd else layer for layer in layers]
    return KVCaches(tuple(layers), gpu_layout(layers[0]))


def make_plan(records: list[torch.Tensor], caches: KVCaches) -> TransferPlan:
    """Part of the first record, all of the second."""
    first, second = records
    ranges = [
        TransferRange(first.data_ptr(), first.shape[2], 3, 40, 5, 0, 0),
        TransferRange(second.data_ptr(), second.shape[2], 0, second.shape[2], 64, 0, 1),
    ]
    return TransferPlan.build(ranges, [7, 2, 9, 4, 1, 0], caches, first.dtype)


def make_records(storage: torch.dtype, pinned: tuple[bool, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    records = [torch.randn(LAYERS, 2, n, HEADS, HEAD_DIM, generator=generator).to(storage) for n in (80, 30)]
    return [record.pin_memory() if p else record for record, p in zip(records, pinned, strict=True)]


def make_rope(neox: bool = True) -> RopeTable:
    angles = torch.rand(2, HEAD_DIM // 2, generator=torch.Generator().manual_seed(3)) * 2 * math.pi
    return RopeTable(angles.cos(), angles.sin(), neox)


@needs_gpu
@pytest.mark.parametrize(
    "pinned",
    [
        pytest.param((True, True), marks=needs_kernels),
        pytest.param((True, False), marks=needs_kernels),
        (False, False),
    ],
)
@pytest.mark.parametrize("nhd", [True, False])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_does_what_the_cpu_does(
    dtype: torch.dtype, storage: torch.dtype, neox: bool, nhd: bool, pinned: tuple[bool, ...]
) -> None:
    rope = make_rope(neox)
    records = make_records(storage, pinned)
    caches, saved = [], []
    for device in ("cpu", "cuda"):
        caches.append(make_caches(dtype, device, nhd))
        plan = make_plan(records, caches[-1])
        saved.append(make_records(storage, pinned))
        for transfer in (
            Transfer(Kind.SCATTER, plan, rope),
            Transfer(Kind.ROTATE, plan, rope),
            Transfer(Kind.GATHER, make_plan(saved[-1], caches[-1])),
        ):
            for layer in range(LAYERS):
                transfer.run(layer)
            if device == "cuda":
                torch.cuda.synchronize()
    for expected, found in zip(*(one.layers for one in caches), strict=True):
        assert torch.equal(expected, found.cpu())
    assert all(torch.equal(expected, found) for expected, found in zip(*saved, strict=True))


@needs_gpu
@needs_kernels
@pytest.mark.parametrize("pinned", [(True, True), (True, False)])
def test_a_pass_sees_its_loads_and_saves_what_it_computed(pinned: tuple[bool, ...]) -> None:
    records, results = make_records(torch.float32, pinned), []
    for device in ("cpu", "cuda"):
        caches = make_caches(torch.float32, device, nhd=True)
        stream, saved = LayerStream.on(caches.device), make_records(torch.float32, pinned)
        gather = Transfer(Kind.GATHER, make_plan(saved, caches))
        scatter = Transfer(Kind.SCATTER, make_plan(records, caches), make_rope())
        stream.start(scatter, lambda layer: None, lambda layer: layer < 2)
        seen = []
        for layer, cache in enumerate(caches.layers):
            stream.need(layer)
            seen.append(cache.clone())
            if device == "cuda":
                torch.cuda._sleep(20_000_000)  # the device is far behind
            cache.add_(1)
            stream.save(gather, layer)
            cache.zero_()
        stream.synchronize()
        assert stream.take_load_s() > 0
        results.append([*saved, *(one.cpu() for one in seen)])
    assert all(torch.equal(expected, found) for expected, found in zip(*results, strict=True))


@needs_gpu
@needs_kernels
def test_nothing_but_the_end_of_a_step_waits_for_the_device() -> None:
    caches = make_caches(torch.float32, "cuda", nhd=True)
    records, saved = (make_records(torch.float32, (True, True)) for _ in range(2))
    stream = LayerStream.on(caches.device)

    def submit_a_pass() -> None:
        scatter = Transfer(Kind.SCATTER, make_plan(records, caches), make_rope())
        gather = Transfer(Kind.GATHER, make_plan(saved, caches))
        stream.start(scatter, lambda layer: None, lambda layer: True)
        for layer in range(LAYERS):
            stream.need(layer)
            stream.save(gather, layer)

    submit_a_pass()  # allocates what a second one finds in torch's caches
    stream.synchronize()
    torch.cuda._sleep(2_000_000_000)  # a second and more
    busy = torch.cuda.Event()
    busy.record()
    submit_a_pass()
    assert not busy.query(), "a transfer waited for the device"
    stream.synchronize()
    assert busy.query()
