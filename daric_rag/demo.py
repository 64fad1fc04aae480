"""`python -m daric_rag.demo`: the same documents, in another order for every question, without and with reuse."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from daric_rag.commands.quiet import held_back_stderr, quiet_environment
from daric_rag.commands.token_bars import TokenBars, token_kinds
from daric_rag.config import DaricConfig
from daric_rag.prompt import ChunkedPrompt

if TYPE_CHECKING:
    from daric_rag.engine.engine import DaricEngine
    from daric_rag.engine.result import GenerationResult

QUESTIONS = (
    "Who built the lighthouse?",
    "Who is the librarian?",
    "When was the football club founded?",
)
SYSTEM = "Answer the question in one short sentence, using only the documents."
MAX_TOKENS = 24
_COLUMNS = 100


@dataclass(frozen=True)
class Comparison:
    """One question answered twice over the same prompt."""

    question: str
    names: tuple[str, ...]
    prompt: ChunkedPrompt
    plain: GenerationResult
    reuse: GenerationResult

    @property
    def ratio(self) -> float:
        """TTFT of plain vLLM divided by TTFT with reuse."""
        return self.plain.metrics.ttft_s / self.reuse.metrics.ttft_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status."""
    options = _parser().parse_args(arguments)
    quiet_environment()
    try:
        _run(options)
    except KeyboardInterrupt:
        return 130
    return 0


def sample_documents() -> dict[str, str]:
    """The texts that come with the package, by file name."""
    folder = files("daric_rag") / "sample_documents"
    return {
        item.name: item.read_text(encoding="utf-8").strip()
        for item in sorted(folder.iterdir(), key=lambda item: item.name)
        if item.name.endswith(".txt")
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m daric_rag.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m", help="an embedded model, a path or a hub id")
    parser.add_argument("--n-avg", type=int, default=32, help="recomputed tokens per chunk on average")
    parser.add_argument("--verbose", action="store_true", help="show vLLM's own messages")
    return parser


def _run(options: argparse.Namespace) -> None:
    documents = sample_documents()
    config = DaricConfig(n_avg=options.n_avg)
    print(f"{len(documents)} documents about an island that does not exist, {len(QUESTIONS)} questions.")
    print("For each question the retriever puts the same documents into another order.")
    print("What happened to each token of a prompt is drawn like this:")
    for line in _bars().legend():
        print(f"   {line}")
    print()
    with _step("Ordering the documents for each question"), held_back_stderr(options.verbose):
        orders = _rank(documents)
    with _step(f"Starting vLLM with {options.model}"):
        engine = _start(options.model, config, options.verbose)
    with engine:
        with _step("One throw-away request each way, so that neither pays for vLLM's first steps"):
            _warm_up(engine)
        comparisons = []
        for number, (question, order) in enumerate(zip(QUESTIONS, orders, strict=True), start=1):
            comparison = _compare(engine, question, [(name, documents[name]) for name in order])
            _show(engine, number, comparison)
            comparisons.append(comparison)
    _summarise(comparisons)


def _start(model: str, config: DaricConfig, verbose: bool) -> DaricEngine:
    from daric_rag.models import resolve_model

    path = resolve_model(model)  # shows its progress, the first time
    with held_back_stderr(verbose):
        from daric_rag.engine.engine import DaricEngine

        return DaricEngine(path, config, max_model_len=4096)


def _rank(documents: dict[str, str]) -> list[list[str]]:
    """File names in the order of the prompt for each question: the nearest document stands next to it."""
    from daric_rag.retrieval import DaricRetriever, DocumentStore

    with DocumentStore() as store:
        store.add(list(documents.values()), ids=list(documents))
        retriever = DaricRetriever(store, k=len(documents))
        return [[item.id for item in reversed(retriever.retrieve(question))] for question in QUESTIONS]


def _warm_up(engine: DaricEngine) -> None:
    prompt = ChunkedPrompt("A throw-away prompt.", ["one " * 150, "two " * 150, "three " * 150], "Go on.")
    for reuse in (False, True, True):
        engine.generate(prompt, _sampling(4), reuse=reuse)


def _compare(engine: DaricEngine, question: str, documents: Sequence[tuple[str, str]]) -> Comparison:
    prompt = ChunkedPrompt(SYSTEM, [text for _, text in documents], question)
    plain = engine.generate(prompt, _sampling(MAX_TOKENS), reuse=False)
    reuse = engine.generate(prompt, _sampling(MAX_TOKENS))
    return Comparison(question, tuple(name for name, _ in documents), prompt, plain, reuse)


def _sampling(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def _show(engine: DaricEngine, number: int, comparison: Comparison) -> None:
    bars = _bars()
    layout = engine.processor.process(comparison.prompt, engine.config)
    metrics = comparison.reuse.metrics
    kinds = token_kinds(metrics, layout.bounds, layout.live)
    plain_metrics = comparison.plain.metrics

    print(f"\n{number}. {comparison.question}")
    print(f"   plain vLLM  {_first_line(comparison.plain.text)}")
    print(f"   with reuse  {_first_line(comparison.reuse.text)}\n")
    names = ["system prompt", *comparison.names, "question"]
    for row in bars.rows(names, layout.bounds, kinds):
        print(f"   {row}")
    print(
        f"   {metrics.prompt_tokens} tokens: {metrics.loaded_tokens} loaded, {metrics.generated_tokens} generated, "
        f"{metrics.engine_hit_tokens} engine hits, {metrics.live_tokens} live; "
        f"{metrics.recomputed_tokens - metrics.live_tokens} recomputed"
    )
    print(
        f"   time to first token: plain vLLM {plain_metrics.ttft_s:.2f} s "
        f"({plain_metrics.live_tokens} tokens computed), with reuse {metrics.ttft_s:.2f} s"
    )


def _bars() -> TokenBars:
    columns = min(_COLUMNS, shutil.get_terminal_size((_COLUMNS, 24)).columns)
    return TokenBars(columns - len("   "), _wants_colour())


def _summarise(comparisons: Sequence[Comparison]) -> None:
    print(f"\n{'time to first token':<40} {'plain vLLM':>12} {'with reuse':>12} {'ratio':>8}")
    for number, comparison in enumerate(comparisons, start=1):
        what = "nothing stored yet" if number == 1 else "documents stored, another order"
        plain, reuse = comparison.plain.metrics.ttft_s, comparison.reuse.metrics.ttft_s
        print(f"{number}. {what:<37} {plain:>10.2f} s {reuse:>10.2f} s {comparison.ratio:>7.1f}x")


def _first_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _COLUMNS - 16 else line[: _COLUMNS - 17] + "…"


def _wants_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Say what is being done, then how long it took."""
    print(f"{what} …", end=" ", flush=True)
    started = time.perf_counter()
    yield
    print(f"{time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
