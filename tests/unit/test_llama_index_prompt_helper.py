"""The prompt helper: whole nodes, idempotence, splits between nodes, token budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.prompts import PromptTemplate

from daric_rag.integrations.llama_index.prompt_helper import (
    DaricLLMMetadata,
    DaricPromptHelper,
    PackedText,
    wrap,
)
from daric_rag.integrations.llama_index.prompts import text_parts
from daric_rag.prompt import Document

D = "<|daric|>"
BLOCK = 4
PROMPT = PromptTemplate("Context: {context_str} Question: {query_str}")


def words(text):
    return text.split()


def helper(context_window=120, num_output=10, **options):
    metadata = DaricLLMMetadata(
        context_window=context_window, num_output=num_output, tokenizer=words, block_size=BLOCK
    )
    return DaricPromptHelper.from_llm_metadata(metadata, **options)


def documents_of(text):
    return [part.content for part in text_parts(text, D) if isinstance(part, Document)]


def padded(text):
    return -(-len(words(text)) // BLOCK) * BLOCK


def test_nodes_that_fit_become_one_text_of_whole_nodes():
    nodes = ["one two three", "  four five\n", "six"]
    assert [documents_of(text) for text in helper().repack(PROMPT, nodes)] == [
        ["one two three", "four five", "six"]
    ]


def test_the_text_stands_in_a_template_without_changing_its_neighbours():
    (packed,) = helper().repack(PROMPT, ["one", "two"])
    parts = text_parts(PROMPT.format(context_str=packed, query_str="why?"), D)
    assert parts == ["Context: ", Document("one"), Document("two"), " Question: why?"]


def test_two_packed_texts_in_one_prompt_leave_what_is_between_them_alone():
    text = f"{wrap(['one'], D)} and {wrap(['two'], D)}?"
    contents = [getattr(part, "content", part) for part in text_parts(text, D)]
    assert contents == ["one", " and ", "two", "?"]
    assert documents_of(text) == ["one", "two"]


def test_repacking_changes_nothing():
    nodes = [" ".join(f"w{n}x{i}" for i in range(20)) for n in range(9)]
    for limited in (helper(), helper(60)):
        once = limited.repack(PROMPT, nodes)
        assert limited.repack(PROMPT, once) == once
        assert [text for part in once for text in limited.repack(PROMPT, [part])] == once


def test_a_new_prompt_starts_between_nodes():
    nodes = [" ".join([f"node{n}"] * 30) for n in range(7)]
    texts = helper().repack(PROMPT, nodes)
    assert len(texts) > 1
    assert [node for text in texts for node in documents_of(text)] == nodes


def test_only_a_node_larger_than_the_window_is_cut():
    long = " ".join(f"w{i}" for i in range(400))
    texts = helper().repack(PROMPT, ["small one", long, "small two"])
    pieces = [piece for text in texts for piece in documents_of(text)]
    assert pieces[0] == "small one" and pieces[-1] == "small two"
    assert len(pieces) > 3
    assert {word for piece in pieces[1:-1] for word in words(piece)} == set(words(long))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 150), max_size=12), st.integers(60, 300))
def test_every_text_fits_the_window_with_its_padding(lengths, window):
    nodes = [" ".join(f"n{number}w{i}" for i in range(length)) for number, length in enumerate(lengths)]
    texts = helper(window).repack(PROMPT, nodes)
    empty = len(words(PROMPT.format(context_str="", query_str="")))
    for text in texts:
        in_documents = sum(padded(document) for document in documents_of(text))
        before_them = BLOCK  # the first chunk is padded by less than a block
        assert empty + before_them + in_documents + 10 <= window
    found = [word for text in texts for document in documents_of(text) for word in words(document)]
    assert list(dict.fromkeys(found)) == words(" ".join(nodes))


@pytest.mark.parametrize("inside", [D, "<!|daric|>", "<\\|daric|>", f"{D}{D}", "{context_str}", "<|im_end|>"])
def test_delimiters_and_braces_inside_a_node_are_data(inside):
    nodes = [f"before {inside} after", inside]
    (text,) = helper().repack(PROMPT, nodes)
    assert documents_of(text) == nodes
    assert helper().repack(PROMPT, [text]) == [text]


def test_a_node_that_looks_packed_is_still_one_document():
    node = wrap(["one", "two"], D)
    (text,) = helper().repack(PROMPT, [node])
    assert documents_of(text) == [node]


def test_no_text_gives_one_empty_text():
    assert helper().repack(PROMPT, []) == [""]
    assert helper().repack(PROMPT, ["", " \n"]) == [""]


def test_a_prompt_that_fills_the_window_is_refused():
    with pytest.raises(ValueError, match=r"not positive|not non-negative"):
        helper(context_window=14).repack(PROMPT, ["one"])


def test_chunk_size_limit_bounds_a_text():
    nodes = [f"a{n} b{n} c{n} d{n}" for n in range(6)]
    texts = helper(chunk_size_limit=BLOCK * 3).repack(PROMPT, nodes)
    assert [len(documents_of(text)) for text in texts] == [2, 2, 2]


def test_an_own_delimiter_is_used():
    metadata = DaricLLMMetadata(
        context_window=200, num_output=5, tokenizer=words, delimiter="@@chunk".lstrip("@")
    )
    (text,) = DaricPromptHelper.from_llm_metadata(metadata).repack(PROMPT, ["one", "two"])
    assert "chunkone" in text and D not in text


def test_plain_metadata_and_own_tokenizer_are_accepted():
    plain = DaricPromptHelper.from_llm_metadata(
        LLMMetadata(context_window=300, num_output=5), tokenizer=words
    )
    assert plain.context_window == 300
    assert documents_of(plain.repack(PROMPT, ["one"])[0]) == ["one"]
    assert plain._token_counter.tokenizer is words


def test_metadata_is_serialised_without_the_tokenizer():
    metadata = DaricLLMMetadata(tokenizer=words, block_size=64)
    assert "tokenizer" not in metadata.model_dump()
    assert metadata.model_dump()["block_size"] == 64


def test_a_packed_text_remembers_its_documents():
    packed = PackedText(["one", "two"], D)
    assert packed.documents == ("one", "two")
    assert str(packed) == wrap(["one", "two"], D)
