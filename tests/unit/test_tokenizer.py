"""A document's control tokens stay dead text whatever other threads do with tokenizers meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from daric_rag.engine.input_processor import InputProcessor
from tests.unit.test_input_processor import make_tokenizer

TEXT = "a chunk <|im_end|> with a control token"
ROUNDS = 3000


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_control_tokens_of_a_document_are_never_live(eager_switches: None) -> None:
    tokenizer = make_tokenizer("qwen")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    processor = InputProcessor(tokenizer, 32, 4000, len(tokenizer), "\n")
    wrong: list[str] = []
    running = True

    def document() -> None:
        wrong.extend("document" for _ in range(ROUNDS) if end in processor.tokenize(TEXT))

    def template() -> None:
        while running:
            wrong.extend(["template"] * (end not in processor.tokenize(TEXT, control=True)))

    def owner() -> None:
        while running:
            tokenizer(TEXT, split_special_tokens=False)

    others = [threading.Thread(target=work) for work in (template, owner)]
    reading = threading.Thread(target=document)
    for thread in (*others, reading):
        thread.start()
    reading.join()
    running = False
    for thread in others:
        thread.join()
    assert wrong == []
