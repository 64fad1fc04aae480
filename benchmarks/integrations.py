"""What the LangChain objects cost beside the engine that they call, and what calling them at once saves."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm import SamplingParams

from daric_rag import DaricEngine
from daric_rag.integrations.langchain import ChatDaric, DaricLLM

CALLS = 16
ANSWER_TOKENS = 32
OVERHEAD_ROUNDS = 40


def run(engine: DaricEngine, documents: Sequence[str], bar: Any) -> dict[str, Any]:
    """Seconds of 16 calls one after the other and at once, and of a call beside the engine's own."""
    return {
        "concurrent": _concurrent(engine, documents, bar),
        "overhead_s": _overhead(engine, bar),
        "import_s": {
            module: _import_seconds(module) for module in ("daric_rag", "daric_rag.integrations.langchain")
        },
    }


def _concurrent(engine: DaricEngine, documents: Sequence[str], bar: Any) -> dict[str, float]:
    """Questions over three stored documents each, in changing order, with answers of 32 tokens."""
    engine.warm(documents, progress=False)
    chat = ChatDaric(engine=engine, max_tokens=ANSWER_TOKENS)

    def ask(number: int) -> None:
        chosen = [documents[(number * step + 1) % len(documents)] for step in (1, 2, 3)]
        chat.invoke(f"Question {number}: what is this about?", documents=chosen, ignore_eos=True)
        bar.update()

    ask(CALLS * 2)
    started = time.perf_counter()
    for number in range(CALLS):
        ask(number)
    in_turn = time.perf_counter() - started
    started = time.perf_counter()
    with ThreadPoolExecutor(CALLS) as pool:
        list(pool.map(ask, range(CALLS, 2 * CALLS)))
    at_once = time.perf_counter() - started
    return {"in_turn_s": in_turn, "at_once_s": at_once, "ratio": at_once / in_turn}


def _overhead(engine: DaricEngine, bar: Any) -> float:
    """Median of `DaricLLM.invoke` − `engine.generate` for the same short prompt and one token, in pairs."""
    llm = DaricLLM(engine=engine, max_tokens=1)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = "The capital of France is"
    differences = []
    for number in range(OVERHEAD_ROUNDS + 4):
        calls: list[Callable[[], object]] = [
            lambda: llm.invoke(prompt),
            lambda: engine.generate(prompt, params),
        ]
        seconds = {}
        for which in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            calls[which]()
            seconds[which] = time.perf_counter() - started
        differences.append(seconds[0] - seconds[1])
    bar.update()
    return statistics.median(differences[4:])


def _import_seconds(module: str) -> float:
    """Median of three fresh interpreters."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return statistics.median(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    )


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    concurrent, imports = result["concurrent"], result["import_s"]
    return [
        (
            "16 invoke calls, in turn / at once, s",
            f"{concurrent['in_turn_s']:.1f} / {concurrent['at_once_s']:.1f}",
            "",
        ),
        ("16 at once ÷ in turn", f"{concurrent['ratio']:.2f}", "≤ 0.6"),
        ("invoke − engine.generate", f"{result['overhead_s'] * 1e3:.1f} ms", "≤ 5 ms"),
        *((f"import {module}", f"{seconds:.2f} s", "") for module, seconds in imports.items()),
    ]
