"""The text form of a prompt carries any text, also text that looks like a delimiter."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DEFAULT_DELIMITER
from daric_rag.prompt import ChatMessage, ChatPrompt, ChunkedPrompt, Document, Live, has_delimiter

FRAGMENTS = st.sampled_from(
    [
        DEFAULT_DELIMITER,
        "<!|daric|>",
        "<\\|daric|>",
        "<\\!|daric|>",
        "<",
        "|daric|>",
        "\\",
        "!",
        "x",
        "\n",
        "##",
        "#",
    ]
)
TEXT = st.one_of(st.text(), st.lists(FRAGMENTS, max_size=8).map("".join))
DOCUMENTS = st.lists(st.one_of(TEXT, TEXT.map(Live)), max_size=5).map(tuple)


@given(TEXT, DOCUMENTS, TEXT, st.sampled_from([DEFAULT_DELIMITER, "[[chunk", "§§§"[:1] + "abc"]))
def test_text_round_trip(system: str, documents: tuple[str | Live, ...], query: str, delimiter: str) -> None:
    prompt = ChunkedPrompt(system, documents, query)
    if delimiter == "[[chunk":
        with pytest.raises(ValueError, match="first character"):
            prompt.to_text(delimiter)
    else:
        assert ChunkedPrompt.from_text(prompt.to_text(delimiter), delimiter) == prompt


def test_document_with_delimiter_stays_one_document() -> None:
    hostile = f"a{DEFAULT_DELIMITER}b<!|daric|>c"
    text = ChunkedPrompt("s", [hostile], "q").to_text()
    assert ChunkedPrompt.from_text(text).documents == (hostile,)


def test_text_without_delimiter_is_a_query() -> None:
    assert not has_delimiter("plain")
    assert ChunkedPrompt.from_text("plain") == ChunkedPrompt(query="plain")


def test_joining_by_hand_works() -> None:
    text = DEFAULT_DELIMITER.join(["system", "one", "two", "query"])
    assert ChunkedPrompt.from_text(text) == ChunkedPrompt("system", ("one", "two"), "query")


@pytest.mark.parametrize(
    "documents",
    ["one text", b"bytes", [b"bytes"], [[1, -2]], [[1, True]], [3.5], 5, None, [None], {"a"}, iter("a")],
)
def test_bad_documents_are_named(documents: Any) -> None:
    with pytest.raises(ValueError, match="documents"):
        ChunkedPrompt(documents=documents)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=6))
def test_token_ids_are_a_tuple_of_integers_however_they_come(token_ids: list[int]) -> None:
    array = np.array(token_ids, dtype=np.int64)
    for form in (
        token_ids,
        tuple(token_ids),
        array,
        array.astype(np.uint32),
        list(array),
        memoryview(array).tolist(),
    ):
        prompt = ChunkedPrompt(form, [form, Live(form)], form)  # type: ignore[arg-type, list-item]
        assert prompt == ChunkedPrompt(token_ids, [token_ids, Live(token_ids)], token_ids)
        assert hash(prompt) == hash(ChunkedPrompt(token_ids, [token_ids, Live(token_ids)], token_ids))
        assert {type(token) for token in prompt.system} <= {int}


NO_TOKEN = st.one_of(
    st.integers(max_value=-1), st.booleans(), st.floats(), st.text(), st.binary(), st.none(), st.just([1])
)
NO_CONTENT = st.one_of(
    st.integers(),
    st.floats(),
    st.none(),
    st.binary(),
    st.builds(iter, st.lists(st.integers(0, 9))),
    st.sets(st.integers(0, 9)),
    st.dictionaries(st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.lists(st.integers(0, 9)), min_size=1).map(lambda rows: [rows]),
    st.just(np.array(3)),
    st.just(np.ones((2, 2), dtype=int)),
    st.just(np.array([0.5])),
    st.just(np.array([True])),
    st.tuples(st.lists(st.integers(0, 9)), NO_TOKEN).map(lambda pair: [*pair[0], pair[1]]),
)


@given(NO_CONTENT)
def test_what_is_neither_text_nor_token_ids_is_refused_by_its_place(wrong: Any) -> None:
    for place, make in {
        "system": lambda: ChunkedPrompt(system=wrong),
        "query": lambda: ChunkedPrompt(query=wrong),
        r"documents\[1\]": lambda: ChunkedPrompt(documents=["one", wrong]),
        r"Live\.content": lambda: Live(wrong),
        r"Document\.content": lambda: Document(wrong),
        r"ChatMessage\.content": lambda: ChatMessage("user", ["text", wrong]),
        r"ChatPrompt\.messages": lambda: ChatPrompt([wrong]),
    }.items():
        with pytest.raises(ValueError, match=f"^{place}"):
            make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ChatPrompt([]), "at least one message"),
        (lambda: ChatPrompt("hello"), "messages: a sequence of ChatMessage.*'hello'"),
        (lambda: ChatPrompt([ChatMessage("user", "a")], tools=5), "tools: .*int 5"),
        (lambda: ChatMessage(5, "text"), "role: .*int 5"),
        (lambda: ChatMessage("user", None), "content: .*None"),
        (lambda: ChatMessage("user", "text", extra=[1]), r"extra: .*list \[1\]"),
    ],
)
def test_bad_conversations_are_named(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_token_ids_have_no_text_form() -> None:
    with pytest.raises(ValueError, match=r"documents\[0\]: token ids"):
        ChunkedPrompt(documents=[[1, 2, 3]]).to_text()
