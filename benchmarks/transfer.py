"""Seconds to move a prompt's KV between records and CPU blocks, beside `Tensor.copy_` of the same bytes.

    python -m benchmarks.transfer [--tokens 6000] [--rounds 15] [--json PATH]

Figures are medians over rounds; in every round each method moves the whole prompt once, all interleaved, so
that what else the machine does falls on all of them. Ratios are medians of the per-round ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from daric_rag.engine.worker.kv_layout import KVCaches
from daric_rag.engine.worker.transfer import (
    Kind,
    RopeTable,
    Transfer,
    TransferPlan,
    TransferRange,
    kernels,
)
from daric_rag.engine.worker.transfer.reference import Reference

SEGMENT_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """A model's KV shape."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Prompt:
    """Records of a prompt's segments, the blocks they belong to, and what moves them."""

    records: list[torch.Tensor]
    plan: TransferPlan
    rope: RopeTable


SHAPES = (Shape("SmolLM2-135M", 30, 3, 64), Shape("8 heads x 128", 8, 8, 128))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAIRS = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("bfloat16", "float32"),
)


def cpu_caches(shape: Shape, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCaches:
    """Empty blocks as vLLM's CPU backend lays them out."""
    size = (num_blocks, shape.num_kv_heads, block_size, 2 * shape.head_dim)
    return KVCaches.of([torch.zeros(size, dtype=dtype) for _ in range(shape.num_layers)])


def make_prompt(caches: KVCaches, tokens: int, storage: torch.dtype, *, pin_memory: bool = False) -> Prompt:
    """A prompt of `tokens` tokens in segments, each rotated by its own Δposition, in shuffled blocks."""
    num_layers, layout = len(caches.layers), caches.layout
    records, ranges = [], []
    for index, start in enumerate(range(0, tokens, SEGMENT_TOKENS)):
        count = min(SEGMENT_TOKENS, tokens - start)
        record = torch.randn(num_layers, 2, count, layout.num_kv_heads, layout.head_dim).to(storage)
        records.append(record.pin_memory() if pin_memory else record)
        ranges.append(TransferRange(records[-1].data_ptr(), count, 0, count, start, 0, index))
    angles = torch.rand(len(ranges), layout.head_dim // 2) * 6.28
    plan = TransferPlan.build(ranges, torch.randperm(caches.num_blocks).tolist(), caches, storage)
    return Prompt(records, plan, RopeTable(angles.cos(), angles.sin(), neox=True))


def methods(prompt: Prompt) -> dict[str, Callable[[], None]]:
    """Everything that is timed, by name; each moves all layers of the prompt once."""
    plan, rope, layers = prompt.plan, prompt.rope, prompt.plan.caches.layers
    sources = [torch.empty_like(cache).copy_(cache) for cache in layers]

    def copy() -> None:
        for cache, source in zip(layers, sources, strict=True):
            cache.copy_(source)

    def compiled(kind: Kind, rope: RopeTable | None) -> Callable[[], None]:
        def run() -> None:
            transfer = Transfer(kind, plan, rope)
            for layer in range(len(layers)):
                transfer.run(layer)

        return run

    def pure_torch() -> None:
        transfer = Reference(Kind.SCATTER, plan, rope)
        for layer, cache in enumerate(layers):
            transfer.run(cache, layer)

    return {
        "copy_": copy,
        "scatter + rotate": compiled(Kind.SCATTER, rope),
        "gather": compiled(Kind.GATHER, None),
        "rotate": compiled(Kind.ROTATE, rope),
        "scatter + rotate, pure torch": pure_torch,
    }


def measure(prompt: Prompt, rounds: int) -> dict[str, list[float]]:
    """Seconds of every method in every round, after one round that is thrown away."""
    timed = methods(prompt)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for round_index in range(rounds + 1):
        for name, run in timed.items():
            begin = time.perf_counter()
            run()
            if round_index > 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def report(shape: Shape, storage: str, dtype: str, prompt: Prompt, rounds: int) -> dict[str, object]:
    """One row of the table, as JSON keeps it."""
    seconds = measure(prompt, rounds)

    def ratio(over: str, under: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))

    moved = sum(cache.numel() * cache.element_size() for cache in prompt.plan.caches.layers)
    return {
        "model": shape.name,
        "storage_dtype": storage,
        "cache_dtype": dtype,
        "bytes": moved,
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "scatter_over_copy": ratio("scatter + rotate", "copy_"),
        "gather_over_copy": ratio("gather", "copy_"),
        "rotate_over_copy": ratio("rotate", "copy_"),
        "scatter_over_pure_torch": ratio("scatter + rotate", "scatter + rotate, pure torch"),
    }


def print_table(rows: list[dict[str, object]]) -> None:
    """The figures, one model and pair of dtypes a line."""
    header = (
        "model",
        "storage -> cache",
        "MB",
        "scatter ms",
        "/ copy_",
        "gather / copy_",
        "rotate / copy_",
        "/ torch",
    )
    print(("{:14} {:20} {:>6} {:>11} {:>8} {:>15} {:>15} {:>8}").format(*header))
    for row in rows:
        seconds = row["seconds"]
        assert isinstance(seconds, dict) and isinstance(row["bytes"], int)
        print(
            f"{row['model']:14} {row['storage_dtype']} -> {row['cache_dtype']:8} {row['bytes'] / 1e6:6.0f} "
            f"{seconds['scatter + rotate'] * 1e3:11.1f} {row['scatter_over_copy']:8.2f} "
            f"{row['gather_over_copy']:15.2f} {row['rotate_over_copy']:15.2f} "
            f"{row['scatter_over_pure_torch']:8.2f}"
        )


def figures(tokens: int, block_size: int, rounds: int) -> list[dict[str, object]]:
    """Measure every model and pair of dtypes."""
    rows = []
    for shape in SHAPES:
        for storage, dtype in PAIRS:
            caches = cpu_caches(shape, -(-tokens // block_size), block_size, DTYPES[dtype])
            prompt = make_prompt(caches, tokens, DTYPES[storage])
            rows.append(report(shape, storage, dtype, prompt, rounds))
    return rows


def main() -> None:
    """Run every model and pair of dtypes; print the table and, with --json, write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=6000, help="tokens of the prompt")
    parser.add_argument("--block-size", type=int, default=32, help="tokens a block")
    parser.add_argument("--rounds", type=int, default=15, help="rounds to take the median of")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    built = kernels.cpu_library() is not None
    print(f"CPU kernels {'built' if built else 'NOT built'}, {torch.get_num_threads()} threads")
    rows = figures(options.tokens, options.block_size, options.rounds)
    print_table(rows)
    if options.json:
        written = {
            "kernels_built": built,
            "threads": torch.get_num_threads(),
            "tokens": options.tokens,
            "rows": rows,
        }
        options.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
