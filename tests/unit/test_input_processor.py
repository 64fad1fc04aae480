"""Chunks, padding and layout of prompts, and what happens at the end of the model's window."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from daric_rag import ChatMessage, ChatPrompt, ChunkedPrompt, Document, Live
from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import InputProcessor
from tests.character_tokenizer import CharacterTokenizer

BLOCK = 32
CONFIG = DaricConfig()


def make_processor(max_model_len: int = 1000) -> InputProcessor:
    return InputProcessor(CharacterTokenizer(), BLOCK, max_model_len, 0x110000, "\n")


def text_of(token_ids: list[int], bound: tuple[int, int]) -> str:
    return "".join(map(chr, token_ids[bound[0] : bound[1]]))


def test_chunks_start_on_block_boundaries_and_keep_their_tokens() -> None:
    processed = make_processor().process(
        ChunkedPrompt("system", ["first", "x" * 32, "third"], "query"), CONFIG
    )
    assert all(start % BLOCK == 0 for start, _ in processed.bounds)
    assert [text_of(processed.token_ids, bound) for bound in processed.documents] == [
        "first" + "\n" * 27,
        "x" * 32,
        "third" + "\n" * 27,
    ]
    assert processed.live == (False, False, False, False, True)
    text = "".join(map(chr, processed.token_ids))
    assert (
        text.replace("\n", "") == "[system]system[end][user]first" + "x" * 32 + "thirdquery[end][assistant]"
    )
    assert processed.padding_tokens == text.count("\n")


def test_a_document_is_the_same_tokens_wherever_it_stands() -> None:
    processor = make_processor()
    alone = processor.warm_chunk("  a document ").token_ids
    for documents in (["a document", "b"], ["b", "a document"], ["b", Live("Source 2:"), "\na document"]):
        processed = processor.process(ChunkedPrompt("", documents, "q"), CONFIG)
        chunks = [processed.token_ids[start:end] for start, end in processed.documents]
        assert alone in chunks


def test_live_pieces_between_documents_are_not_cached() -> None:
    message = ChatMessage(
        "user", [Document("one"), "\n\n", Document("two"), "Source 3:", Document("three"), "?"]
    )
    processed = make_processor().process(ChatPrompt([message]), CONFIG)
    assert len(processed.documents) == 3
    live = [
        text_of(processed.token_ids, bound).strip()
        for bound, is_live in zip(processed.bounds, processed.live, strict=True)
        if is_live
    ]
    assert live == ["Source 3:", "?[end][assistant]"]


def test_empty_documents_are_dropped_and_counted() -> None:
    processed = make_processor().process(ChunkedPrompt("s", ["", "a", " \n"], "q"), CONFIG)
    assert (len(processed.documents), processed.dropped_documents) == (1, 2)


@pytest.mark.parametrize("spare", [0, 1, 40])
def test_a_prompt_that_only_padding_makes_too_long_is_sent_without_it(spare: int) -> None:
    prompt = ChunkedPrompt("system", ["first", "second", "third"], "query")
    roomy = make_processor().process(prompt, CONFIG)
    needed = len(roomy.token_ids) - roomy.padding_tokens
    processed = make_processor(needed + 1 + spare).process(prompt, CONFIG)
    assert "".join(map(chr, processed.token_ids)) == "".join(map(chr, roomy.token_ids)).replace("\n", "")
    assert (processed.bounds, processed.padding_tokens) == ((), 0)
    with pytest.raises(ValueError, match=rf"{len(roomy.token_ids)} tokens.* at most {needed - 1} "):
        make_processor(needed).process(prompt, CONFIG)
    exact = make_processor(len(roomy.token_ids) + 1).process(prompt, CONFIG)
    assert exact == roomy


def test_a_prompt_in_the_models_own_format_gets_no_template() -> None:
    prompt = ChunkedPrompt("[user]", ["first", "second"], "q[end][assistant]", formatted=True)
    processed = make_processor().process(prompt, CONFIG)
    text = "".join(map(chr, processed.token_ids))
    assert text.replace("\n", "") == "[user]firstsecondq[end][assistant]"
    assert len(processed.documents) == 2


STYLES = ("llama", "mistral", "qwen")


def make_tokenizer(style: str) -> Any:
    """A small tokenizer that behaves at the edges of a text as a family of models' does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    if style == "llama":  # a space before every text, BOS
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif style == "mistral":  # a space before the text only where it does not follow a special token, BOS
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:  # bytes, no BOS
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if style == "qwen" else list("▁\n" + string.printable)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([TEXT, "a system prompt", "Where does the ferry go?"] * 3, trainer)
    if style != "qwen":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


TEXT = "The ferry crosses the bay in half an hour. It sails four times a day, and in storms not at all."


@pytest.mark.parametrize("style", STYLES)
def test_tokenizers_of_every_family_keep_chunks_apart(style: str) -> None:
    tokenizer = make_tokenizer(style)
    processor = InputProcessor(tokenizer, BLOCK, 4000, len(tokenizer), "\n")
    alone = processor.warm_chunk(TEXT).token_ids
    bos = tokenizer.convert_tokens_to_ids("<s>")
    prompts = [
        ChunkedPrompt("a system prompt", [TEXT, "Another text."], "Where does the ferry go?"),
        ChunkedPrompt("", ["Another text.", TEXT], "Where?"),
        ChunkedPrompt("a system prompt", ["Another text.", Live("Source 2:"), TEXT, TEXT], "Where?"),
    ]
    for prompt in [*prompts, prompts[0].to_text()]:
        processed = processor.process(prompt, CONFIG)
        chunks = [processed.token_ids[start:end] for start, end in processed.documents]
        assert alone in chunks
        assert processed.token_ids.count(bos) == (style != "qwen")
        assert style == "qwen" or processed.token_ids[0] == bos
    text = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    padding = alone[len(text) :]
    assert alone[: len(text)] == text
    assert len(set(padding)) == 1 and len(padding) == -len(text) % BLOCK


OUTSIDE = [5, 0x110000]


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (OUTSIDE, r"prompt\[1\]"),
        (ChunkedPrompt(OUTSIDE, ["d"], "q"), r"system\[1\]"),
        (ChunkedPrompt("s", ["d", OUTSIDE], "q"), r"documents\[1\]\[1\]"),
        (ChunkedPrompt("s", [Live(OUTSIDE), "d"], "q"), r"documents\[0\]\[1\]"),
        (ChatPrompt([ChatMessage("user", ["q", Document(OUTSIDE)])]), r"messages\[0\]\.content\[1\]\[1\]"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_by_their_place(prompt: Any, place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place}: token id 1114112 is outside .* of 1114112 tokens"):
        make_processor().process(prompt, CONFIG)


@pytest.mark.parametrize("prompt", [5, None, b"text", [1.5], ["a", "b"], [], "", ChatMessage("user", "text")])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        make_processor().process(prompt, CONFIG)


def test_a_document_to_warm_is_checked_too() -> None:
    processor = make_processor()
    assert processor.warm_chunk(np.array([5, 6])).token_ids == processor.warm_chunk([5, 6]).token_ids  # type: ignore[arg-type]
    for wrong in (OUTSIDE, [1.5], None, 5):
        with pytest.raises(ValueError, match=r"^documents\[7\]"):
            processor.warm_chunk(wrong, "documents[7]")  # type: ignore[arg-type]


def test_a_conversation_that_the_template_refuses_is_a_bad_argument() -> None:
    tokenizer = make_tokenizer("qwen")
    tokenizer.chat_template = "{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}"
    processor = InputProcessor(tokenizer, BLOCK, 4000, len(tokenizer), "\n")
    with pytest.raises(ValueError, match="chat template refuses this conversation: no pilot"):
        processor.process(ChatPrompt([ChatMessage("pilot", "text")]), CONFIG)
