"""Index a corpus of passages and time queries over it.

    python benchmarks/retrieval.py --dataset corpus.json --json result.json

The dataset is a JSON list of objects with `title` and `text`; without it, a small sample is made up.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from daric_rag.retrieval import DocumentStore, Embedder, SentenceTransformerEmbedder


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", type=Path, help="JSON list of {title, text}")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--queries", type=int, default=200, help="number of queries to time (default 200)")
    arguments = parser.parse_args()
    passages = read_passages(arguments.dataset)
    with tempfile.TemporaryDirectory() as directory:
        figures = measure(Path(directory), passages, arguments.queries, SentenceTransformerEmbedder())
    for name, value in figures.items():
        print(f"{name:28} {value:12,.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def read_passages(path: Path | None) -> list[dict[str, str]]:
    """The corpus, or 200 short made-up passages."""
    if path is None:
        return [{"title": f"Item {n}", "text": f"Item {n} weighs {n * 7} grams."} for n in range(200)]
    passages: list[dict[str, str]] = json.loads(path.read_text())
    return passages


def measure(
    directory: Path, passages: list[dict[str, str]], queries: int, embedder: Embedder
) -> dict[str, float]:
    """Times in the named units; every query's k is 10."""
    texts = [f"{passage['title']}\n{passage['text']}" for passage in passages]
    metadatas: list[Any] = [{"title": passage["title"]} for passage in passages]
    figures: dict[str, float] = {"passages": len(texts)}

    embedder.encode_query("load the model")
    start = time.perf_counter()
    with DocumentStore(directory, embedder) as store:
        ids = store.add(texts, metadatas)
        figures["build_s"] = time.perf_counter() - start
    figures["bytes"] = sum(file.stat().st_size for file in directory.iterdir())

    titles = [passage["title"] for passage in passages[:: max(1, len(passages) // queries)]]
    start = time.perf_counter()
    vectors = [embedder.encode_query(title) for title in titles]
    figures["embed_query_ms"] = (time.perf_counter() - start) / len(titles) * 1000

    start = time.perf_counter()
    with DocumentStore(directory, embedder) as store:
        store.search(vectors[0], k=10)
        figures["open_ms"] = (time.perf_counter() - start) * 1000
        figures["query_ms"] = median_ms(lambda n: store.search(vectors[n], k=10), len(titles))
        figures["query_filtered_ms"] = median_ms(
            lambda n: store.search(vectors[n], k=10, filter={"title": titles[n]}), len(titles)
        )
        start = time.perf_counter()
        store.upsert(texts, metadatas, ids)
        figures["upsert_unchanged_s"] = time.perf_counter() - start

    (directory / "vectors.faiss").unlink()
    start = time.perf_counter()
    with DocumentStore(directory, embedder) as store:
        store.search(vectors[0], k=10)
        figures["open_and_rebuild_ms"] = (time.perf_counter() - start) * 1000
    return figures


def median_ms(call: Any, count: int) -> float:
    """Median milliseconds of `call(n)` for n in 0 … count - 1."""
    seconds = []
    for n in range(count):
        start = time.perf_counter()
        call(n)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1000


if __name__ == "__main__":
    main()
