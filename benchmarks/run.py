"""`make bench`: measure, print one table a part, write all figures as JSON.

python -m benchmarks.run --dataset musique_dev.json --prompts 20 --json results.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from daric_rag.progress import progress_bar

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

Rows = list[tuple[str, str, str]]
Keep = Callable[[Any], None]


def main() -> int:
    """Run the chosen parts."""
    arguments = _parse()
    parts = arguments.parts or list(PARTS)
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for name in parts:
        # Written as figures come in, so that an interrupted run keeps what it has.
        def keep(result: Any, name: str = name) -> None:
            results[name] = result
            arguments.json.write_text(json.dumps(results, indent=2))

        result, rows = PARTS[name](arguments, keep)
        keep(result)
        _print(name, rows)
    print(f"\nall figures: {arguments.json}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to measure; default: everything")
    parser.add_argument(
        "--dataset", type=Path, help="a MuSiQue file; default: the package's sample documents"
    )
    parser.add_argument("--prompts", type=int, default=20, help="prompts of the reuse part (default 20)")
    parser.add_argument(
        "--memory-prompts", type=int, default=200, help="prompts of the memory part (default 200)"
    )
    parser.add_argument(
        "--cache-prompts", type=int, default=5, help="prompts of disk and storage (default 5)"
    )
    parser.add_argument("--load-arrivals", type=int, default=3, help="prompts that arrive beside streams")
    parser.add_argument("--load-decodes", type=int, default=16, help="streams beside them (default 16)")
    parser.add_argument("--load-crowd", type=int, default=60, help="streams where passes are counted")
    parser.add_argument("--load-documents", type=int, default=2000, help="documents warmed beside a stream")
    parser.add_argument("--load-disk-prompts", type=int, default=3, help="prompts a speed of the slow disk")
    parser.add_argument("--redis", help="URL of a Redis server to measure look-ups on; default: none")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--n-avg", type=int, default=32, help="recomputation budget per chunk, tokens")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/bench.json"))
    return parser.parse_args()


def _reuse(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import datasets, reuse
    from daric_rag import DaricConfig, DaricEngine

    questions = datasets.load_questions(arguments.dataset, arguments.prompts)
    config = DaricConfig(n_avg=arguments.n_avg, host_bytes=3 << 30, kv_pool_bytes=2 << 30)
    with DaricEngine(arguments.model, config, max_model_len=8192, max_logprobs=-1) as engine:
        with progress_bar(len(questions), "reuse", "prompt") as bar:
            result = reuse.run(engine, questions, bar, keep)
        store = engine.stats()["store"]
        result["host_bytes"], result["host_budget"] = store["host_bytes"], store["host_budget"]
    return result, reuse.rows(result)


def _memory(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import memory
    from daric_rag import DaricConfig, DaricEngine

    config = DaricConfig(host_bytes=128 << 20, kv_pool_bytes=128 << 20)
    with (
        DaricEngine(arguments.model, config, max_model_len=2048) as engine,
        progress_bar(arguments.memory_prompts, "memory", "prompt") as bar,
    ):
        result = memory.run(engine, arguments.memory_prompts, bar)
    return result, memory.rows(result)


def _transfer(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import transfer

    result = transfer.figures(tokens=6000, block_size=32, rounds=9)
    rows = [
        (
            f"{row['model']} {row['storage_dtype']} → {row['cache_dtype']}: scatter ÷ copy_ / ÷ pure torch",
            f"{row['scatter_over_copy']:.2f} / {row['scatter_over_pure_torch']:.2f}",
            f"≤ {2.0 if row['cache_dtype'] == 'float32' else 2.5} / ≤ 0.5",
        )
        for row in result
    ]
    return result, rows


def _lookup(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import cache

    result = cache.run_lookup(arguments.redis)
    return result, cache.lookup_rows(result)


def _disk(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import cache, datasets

    questions = datasets.load_questions(arguments.dataset, arguments.cache_prompts)
    with progress_bar(4 * len(questions), "disk", "prompt") as bar:
        result = cache.run_disk(arguments.model, questions, bar)
    return result, cache.disk_rows(result)


def _storage(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import cache, datasets

    questions = datasets.load_questions(arguments.dataset, arguments.cache_prompts)
    with progress_bar(3 * len(questions), "storage dtype", "prompt") as bar:
        result = cache.run_storage(arguments.model, questions, bar)
    return result, cache.storage_rows(result)


def _integrations(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import datasets, integrations
    from daric_rag import DaricConfig, DaricEngine

    documents = datasets.load_questions(None, 1)[0].documents
    config = DaricConfig(host_bytes=512 << 20, kv_pool_bytes=1 << 30)
    with (
        DaricEngine(arguments.model, config, max_model_len=4096) as engine,
        progress_bar(2 * integrations.CALLS + 2, "integrations", "call") as bar,
    ):
        result = integrations.run(engine, documents, bar)
    return result, integrations.rows(result)


def _load(arguments: argparse.Namespace, keep: Keep) -> tuple[Any, Rows]:
    from benchmarks import datasets, load
    from daric_rag import DaricConfig

    options = load.LoadOptions(
        arguments.load_arrivals,
        arguments.load_decodes,
        arguments.load_crowd,
        arguments.load_documents,
        arguments.load_disk_prompts,
    )
    questions = datasets.load_questions(arguments.dataset, options.num_questions)
    config = DaricConfig(n_avg=arguments.n_avg, host_bytes=3 << 30, kv_pool_bytes=2 << 30)
    result: dict[str, Any] = {}
    with progress_bar(load.NUM_PARTS, "load", "part") as bar:
        for result in load.run(arguments.model, config, questions, options, arguments.redis):
            keep(result)
            bar.update()
    return result, load.rows(result)


PARTS: dict[str, Callable[[argparse.Namespace, Keep], tuple[Any, Rows]]] = {
    "reuse": _reuse,
    "memory": _memory,
    "transfer": _transfer,
    "lookup": _lookup,
    "disk": _disk,
    "storage": _storage,
    "integrations": _integrations,
    "load": _load,
}


def _print(name: str, rows: Rows) -> None:
    print(f"\n{name}")
    width = max(len(figure) for figure, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for figure, value, target in rows:
        print(f"  {figure:<{width}}  {value:>{value_width}}  {target}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
