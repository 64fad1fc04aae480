"""The prompts of the benchmarks: MuSiQue in its authors' form, or the sample documents of the package."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import daric_rag
from daric_rag import ChunkedPrompt

SYSTEM = "Answer the question with a few words, using only the given passages."


@dataclass(frozen=True)
class Question:
    """One question with the documents that it is asked over."""

    question: str
    documents: tuple[str, ...]

    def prompt(self, seed: int | None = None) -> ChunkedPrompt:
        """System prompt, documents (shuffled by `seed` if given), question."""
        documents = list(self.documents)
        if seed is not None:
            random.Random(seed).shuffle(documents)
        return ChunkedPrompt(SYSTEM, documents, f"Question: {self.question}")


def load_questions(dataset: Path | None, count: int) -> list[Question]:
    """The first `count` questions of a MuSiQue file (`question`, `ctxs` of `title` and `text`), or of the samples.

    Raises `ValueError` naming the file if it is not in that form.
    """
    if dataset is None:
        return _sample_questions(count)
    try:
        entries = json.loads(dataset.read_text())[:count]
        return [
            Question(entry["question"], tuple(f"{item['title']}\n{item['text']}" for item in entry["ctxs"]))
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{dataset}: not a MuSiQue file (question, ctxs): {error!r}") from None


def _sample_questions(count: int) -> list[Question]:
    folder = Path(daric_rag.__file__).parent / "sample_documents"
    texts = sorted(file.read_text() for file in folder.glob("*.txt")) or sorted(
        file.read_text() for file in folder.iterdir() if file.suffix in (".md", ".txt")
    )
    questions = []
    for number in range(count):
        documents = random.Random(number).sample(texts, min(10, len(texts)))
        questions.append(Question("What do these passages have in common?", tuple(documents)))
    return questions
