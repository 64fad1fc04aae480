"""`daric-rag ask`: answer questions over a folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from daric_rag.commands.documents import read_folder, split_folder
from daric_rag.commands.engine_options import (
    add_engine_options,
    add_reuse_options,
    make_config,
    start_engine,
    tell,
    tell_skipped,
)
from daric_rag.commands.quiet import held_back_stderr
from daric_rag.prompt import ChunkedPrompt

if TYPE_CHECKING:
    from daric_rag.engine.engine import DaricEngine
    from daric_rag.engine.metrics import RequestMetrics
    from daric_rag.retrieval import DaricRetriever, RetrievedDocument

SYSTEM = "Answer the question in one or two sentences, using only the documents."


def add_parser(commands: Any) -> None:
    """Add the command to the command line."""
    parser = commands.add_parser(
        "ask",
        help="answer questions over a folder of text files",
        description="Answer questions over a folder of text files. Without a question they are read from "
        "standard input, one a line.",
    )
    parser.add_argument("questions", nargs="*", metavar="question")
    parser.add_argument("--docs", required=True, metavar="DIR", help="the folder")
    parser.add_argument("-k", type=int, default=4, help="documents per question (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (%(default)s)")
    parser.add_argument("--system", default=SYSTEM, help="system prompt (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object a question on standard output")
    add_reuse_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Everything that can be wrong with the options is found before the engine starts."""
    from daric_rag.retrieval import DaricRetriever
    from daric_rag.retrieval.document_store import check_k

    check_k(options.k)
    if options.max_tokens < 1:
        raise ValueError(f"max_tokens={options.max_tokens}: must be at least 1")
    config = make_config(options)
    folder = read_folder(options.docs)
    tell_skipped(folder)
    with start_engine(options, config) as engine:
        documents = split_folder(
            folder, options.split_tokens, lambda text: len(engine.processor.tokenize(text))
        )
        tell(f"Reading {len(folder.files)} files as {len(documents)} documents …")
        with held_back_stderr(options.verbose):
            from daric_rag.commands.library import open_library

            store = open_library(folder.path, documents)
        with store:
            retriever = DaricRetriever(store, k=options.k)
            for question in _questions(options.questions):
                _answer(engine, retriever, question, options)
    return 0


def _questions(given: Sequence[str]) -> Iterator[str]:
    if given:
        yield from given
        return
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("\n? ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _answer(
    engine: DaricEngine, retriever: DaricRetriever, question: str, options: argparse.Namespace
) -> None:
    from vllm import SamplingParams

    found = retriever.retrieve(question)
    # The nearest document stands last, beside the question: small models find it more easily there.
    prompt = ChunkedPrompt(options.system, [document.text for document in reversed(found)], question)
    sampling = SamplingParams(max_tokens=options.max_tokens, temperature=0.0)
    answer = ""
    metrics: RequestMetrics | None = None
    for chunk in engine.stream(prompt, sampling):
        answer += chunk.text
        metrics = chunk.metrics or metrics
        if not options.json:
            print(chunk.text, end="", flush=True)
    assert metrics is not None  # the last chunk has them
    if options.json:
        print(json.dumps(_as_json(question, answer, found, metrics), ensure_ascii=False), flush=True)
        return
    print("\n\nSources")
    for number, document in enumerate(found, start=1):
        print(f"  {number}. {document.id}  (similarity {document.score:.2f})", flush=True)
    tell(
        f"\nreused {reused_tokens(metrics)} of {metrics.prompt_tokens} prompt tokens, "
        f"computed {metrics.generated_tokens + metrics.recomputed_tokens}; "
        f"time to first token {metrics.ttft_s:.2f} s"
    )


def reused_tokens(metrics: RequestMetrics) -> int:
    """Prompt tokens whose KV was there before: loaded, or in vLLM's own prefix cache."""
    return metrics.loaded_tokens + metrics.engine_hit_tokens


def _as_json(
    question: str, answer: str, found: Sequence[RetrievedDocument], metrics: RequestMetrics
) -> dict[str, Any]:
    return {
        "question": question,
        "answer": answer,
        "sources": [{"id": item.id, "score": round(item.score, 4), **item.metadata} for item in found],
        "reused_tokens": reused_tokens(metrics),
        "ttft_s": metrics.ttft_s,
        "metrics": metrics.to_dict(),
    }
