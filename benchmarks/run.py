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


def main() -> int:
    """Run the chosen parts."""
    arguments = _parse()
    parts = arguments.parts or list(PARTS)
    results: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS")}
    }
    for name in parts:
        result, rows = PARTS[name](arguments)
        results[name] = result
        _print(name, rows)
        # Written after every part, so that an interrupted run keeps what it has.
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2))
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
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--n-avg", type=int, default=32, help="recomputation budget per chunk, tokens")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/bench.json"))
    return parser.parse_args()


def _reuse(arguments: argparse.Namespace) -> tuple[Any, Rows]:
    from benchmarks import datasets, reuse
    from daric_rag import DaricConfig, DaricEngine

    questions = datasets.load_questions(arguments.dataset, arguments.prompts)
    config = DaricConfig(n_avg=arguments.n_avg, host_bytes=3 << 30, kv_pool_bytes=2 << 30)
    with DaricEngine(arguments.model, config, max_model_len=8192, max_logprobs=-1) as engine:
        with progress_bar(len(questions), "reuse", "prompt") as bar:
            result = reuse.run(engine, questions, bar)
        store = engine.stats()["store"]
        result["host_bytes"], result["host_budget"] = store["host_bytes"], store["host_budget"]
    return result, reuse.rows(result)


def _memory(arguments: argparse.Namespace) -> tuple[Any, Rows]:
    from benchmarks import memory
    from daric_rag import DaricConfig, DaricEngine

    config = DaricConfig(host_bytes=128 << 20, kv_pool_bytes=128 << 20)
    with DaricEngine(arguments.model, config, max_model_len=2048) as engine:
        with progress_bar(arguments.memory_prompts, "memory", "prompt") as bar:
            result = memory.run(engine, arguments.memory_prompts, bar)
    return result, memory.rows(result)


PARTS: dict[str, Callable[[argparse.Namespace], tuple[Any, Rows]]] = {"reuse": _reuse, "memory": _memory}


def _print(name: str, rows: Rows) -> None:
    print(f"\n{name}")
    width = max(len(figure) for figure, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    for figure, value, target in rows:
        print(f"  {figure:<{width}}  {value:>{value_width}}  {target}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
