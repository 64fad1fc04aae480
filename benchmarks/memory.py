"""Resident memory of the engine's processes over many prompts with changing documents."""

from __future__ import annotations

import os
from typing import Any

import psutil

from daric_rag import ChunkedPrompt, DaricEngine

_FILLER = "The town keeps its archive in the old mill by the river and opens it on market days. "


def run(engine: DaricEngine, count: int, bar: Any) -> dict[str, Any]:
    """Ask `count` prompts of three new documents each; return resident bytes along the way."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0)
    readings = []
    for number in range(count):
        documents = [f"Record {number}.{part}. " + _FILLER * 6 for part in range(3)]
        engine.generate(ChunkedPrompt("Answer briefly.", documents, "What is this?"), params)
        if number % max(1, count // 10) == 0 or number == count - 1:
            readings.append((number, resident_bytes()))
        bar.update()
    store = engine.stats()["store"]
    settled = [value for number, value in readings if number >= count // 2]
    return {
        "prompts": count,
        "resident_bytes": readings,
        "growth_second_half": max(settled) / settled[0] - 1,
        "host_bytes": store["host_bytes"],
        "host_budget": store["host_budget"],
        "evictions": store["evictions"],
        "pins": store["pins"],
    }


def resident_bytes() -> int:
    """Resident memory of this process and all of its children."""
    me = psutil.Process(os.getpid())
    return sum(process.memory_info().rss for process in (me, *me.children(recursive=True)))


def rows(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Figure, value, target."""
    first, last = result["resident_bytes"][0][1], result["resident_bytes"][-1][1]
    return [
        ("resident memory, first / last prompt", f"{first / 1e6:.0f} / {last / 1e6:.0f} MB", ""),
        ("growth over the second half", f"{result['growth_second_half']:.2%}", "flat"),
        (
            "host tier ÷ its budget",
            f"{result['host_bytes'] / 1e6:.0f} / {result['host_budget'] / 1e6:.0f} MB",
            "≤ 1",
        ),
        ("evictions; pins left", f"{result['evictions']}; {result['pins']}", "0 pins"),
    ]
