"""The text form of a prompt carries any text, also text that looks like a delimiter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daric_rag.config import DEFAULT_DELIMITER
from daric_rag.prompt import ChunkedPrompt, Live, has_delimiter

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


@pytest.mark.parametrize("documents", ["one text", [b"bytes"], [[1, -2]], [[1, True]], [3.5]])
def test_bad_documents_are_named(documents: object) -> None:
    with pytest.raises(ValueError, match="documents"):
        ChunkedPrompt(documents=documents)  # type: ignore[arg-type]


def test_token_ids_have_no_text_form() -> None:
    with pytest.raises(ValueError, match=r"documents\[0\]: token ids"):
        ChunkedPrompt(documents=[[1, 2, 3]]).to_text()
