"""GB/s of transfers between host records and blocks on a GPU, beside the PCIe peak measured with plain copies.

    python -m benchmarks.transfer_cuda [--tokens 6000] [--rounds 15] [--json PATH]

Figures are medians over rounds in which each method moves the whole prompt once; ends by waiting for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.transfer import Prompt, Shape, make_prompt
from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.transfer import Kind, LayerStream, Transfer, kernels

TO_DEVICE, TO_HOST = "host to device, peak", "device to host, peak"
LLAMA_8B = Shape("32 layers of 8 heads x 128", 32, 8, 128)


def make_caches(shape: Shape, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCaches:
    """Blocks as vLLM lays them out on a GPU by default: tokens before heads."""
    size = (num_blocks, block_size, shape.num_kv_heads, 2 * shape.head_dim)
    layers = [torch.zeros(size, dtype=dtype, device="cuda") for _ in range(shape.num_layers)]
    return KVCaches.of([layer.permute(0, 2, 1, 3) for layer in layers])


def methods(pinned: Prompt, pageable: Prompt) -> dict[str, Callable[[], None]]:
    """Everything that is timed, by name; each moves as many bytes as the prompt has."""
    on_device = [torch.empty_like(record, device="cuda") for record in pinned.records]

    def to_device() -> None:
        for target, source in zip(on_device, pinned.records, strict=True):
            target.copy_(source, non_blocking=True)

    def to_host() -> None:
        for source, target in zip(on_device, pinned.records, strict=True):
            target.copy_(source, non_blocking=True)

    return {
        TO_DEVICE: to_device,
        TO_HOST: to_host,
        "load with rotation, pinned": loads(pinned),
        "load with rotation, not pinned": loads(pageable),
        "save, pinned": saves(pinned),
        "save, not pinned": saves(pageable),
    }


def loads(prompt: Prompt) -> Callable[[], None]:
    """All layers as a pass loads them, without its forward."""
    stream = LayerStream.on(prompt.plan.caches.device)

    def run() -> None:
        transfer = Transfer(Kind.SCATTER, prompt.plan, prompt.rope)
        stream.start(transfer, lambda layer: None, lambda layer: True)
        for layer in range(transfer.num_layers):
            stream.need(layer)
        stream.synchronize()

    return run


def saves(prompt: Prompt) -> Callable[[], None]:
    """All layers as a pass saves them."""
    stream = LayerStream.on(prompt.plan.caches.device)

    def run() -> None:
        transfer = Transfer(Kind.GATHER, prompt.plan)
        for layer in range(transfer.num_layers):
            stream.save(transfer, layer)
        stream.synchronize()

    return run


def measure(timed: dict[str, Callable[[], None]], nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of every method, after one round that is thrown away."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, run in timed.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return {name: nbytes / statistics.median(values[1:]) / 1e9 for name, values in seconds.items()}


def main() -> None:
    """Measure bfloat16 records and blocks of an 8B model; print a line a method and, with --json, write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    caches = make_caches(LLAMA_8B, -(-options.tokens // 16), 16, torch.bfloat16)
    pinned, pageable = (
        make_prompt(caches, options.tokens, torch.bfloat16, pin_memory=pin) for pin in (True, False)
    )
    nbytes = sum(record.nbytes for record in pinned.records)
    speeds = measure(methods(pinned, pageable), nbytes, options.rounds)
    for name, speed in speeds.items():
        peak = speeds[TO_HOST if name in (TO_HOST, "save, pinned", "save, not pinned") else TO_DEVICE]
        print(f"{name}|{speed:.1f} GB/s" + ("" if speed is peak else f", {speed / peak:.2f} of the peak"))
    built = kernels.cuda_library() is not None
    if options.json:
        written = {"kernels_built": built, "bytes": nbytes, "gigabytes_per_second": speeds}
        options.json.write_text(json.dumps(written, indent=2) + "\n")
    print(f"{LLAMA_8B.name}, {nbytes / 1e6:.0f} MB, CUDA kernels {'built' if built else 'NOT built'}")


if __name__ == "__main__":
    main()
