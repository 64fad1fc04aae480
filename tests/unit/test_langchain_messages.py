"""Which parts of LangChain messages become documents, and what is refused."""

from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from daric_rag.config import DEFAULT_DELIMITER as D
from daric_rag.integrations.langchain.messages import (
    PromptFormat,
    artifact_texts,
    document_contents,
    split_delimited,
    to_chat_prompt,
    to_text_prompt,
)
from daric_rag.prompt import ChunkedPrompt, Document, Live
from daric_rag.recognition import Recognizer

FORM = PromptFormat(D)
LONG = "A document about lighthouses, long enough to be recognised when it is in a prompt."


def contents(*messages: BaseMessage, form: PromptFormat = FORM, **kwargs: Any) -> list[list[Any]]:
    return [list(message.content) for message in to_chat_prompt(messages, form, **kwargs).messages]


def roles(*messages: BaseMessage, form: PromptFormat = FORM, **kwargs: Any) -> list[str]:
    return [message.role for message in to_chat_prompt(messages, form, **kwargs).messages]


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def test_roles_and_plain_texts() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("h", name="ann"),
        AIMessage("a"),
        ChatMessage("c", role="critic"),
    ]
    assert contents(*messages) == [["s"], ["h"], ["a"], ["c"]]
    assert roles(*messages) == ["system", "user", "assistant", "critic"]
    assert to_chat_prompt(messages, FORM).messages[1].extra == {"name": "ann"}


def test_blocks_of_a_human_message_are_documents_but_the_last() -> None:
    message = HumanMessage([text("one"), text("two"), text("question")])
    assert contents(message) == [[Document("one"), Document("two"), "question"]]
    assert contents(HumanMessage([text("question")])) == [["question"]]
    assert contents(HumanMessage(["one", "question"])) == [[Document("one"), "question"]]


def test_marks_decide_where_there_are_any() -> None:
    message = HumanMessage(
        [text("intro"), text("one", daric="document"), text("between", daric="live"), text("a"), text("b")]
    )
    assert contents(message) == [["intro", Document("one"), Live("between"), "a", "\n", "b"]]
    assert contents(SystemMessage([text("intro"), {"type": "document", "text": "one"}])) == [
        ["intro", Document("one")]
    ]
    source = {"type": "document", "source": {"type": "text", "data": "one"}}
    assert contents(HumanMessage([source, text("q")])) == [[Document("one"), "q"]]
    assert contents(HumanMessage([{"type": "text-plain", "text": "one"}, text("q")])) == [
        [Document("one"), "q"]
    ]


def test_blocks_of_a_system_message_are_text() -> None:
    assert contents(SystemMessage([text("a"), text("b")])) == [["a", "\n", "b"]]


def test_blocks_of_a_tool_message_are_documents() -> None:
    message = ToolMessage([text("one"), text("two")], tool_call_id="1", name="search")
    with_tools = PromptFormat(D, template_has_tools=True)
    assert contents(message, form=with_tools) == [[Document("one"), Document("two")]]
    assert to_chat_prompt([message], with_tools).messages[0].extra == {"name": "search", "tool_call_id": "1"}
    assert contents(message) == [
        ["<tool_response>\n", Document("one"), Document("two"), "\n</tool_response>"]
    ]
    assert roles(message) == ["user"]


def test_delimiters_split_a_text_and_white_space_between_them_is_dropped() -> None:
    prompt = HumanMessage(f"Read:\n\n{D}one{D}\n\n{D}two{D}\n\nWhy?")
    assert contents(prompt) == [["Read:\n\n", Document("one"), Document("two"), "\n\nWhy?"]]
    assert contents(SystemMessage(f"{D}one{D}")) == [[Document("one")]]


def test_a_delimiter_in_an_answer_or_in_a_document_is_data() -> None:
    assert contents(AIMessage(f"a{D}b")) == [[f"a{D}b"]]
    hostile = f"one{D}two"
    assert contents(HumanMessage([text(hostile), text("q")])) == [[Document(hostile), "q"]]
    assert contents(HumanMessage("q"), documents=[hostile]) == [[Document(hostile), "q"]]


def test_a_delimiter_in_a_known_document_is_data() -> None:
    recognizer = Recognizer()
    hostile = f"{LONG} {D} {LONG}"
    recognizer.register([hostile])
    form = PromptFormat(D, find=recognizer.find)
    assert split_delimited(f"Read: {hostile} Why?", form) == [f"Read: {hostile} Why?"]
    assert split_delimited(f"Read: {D}{hostile}{D}{D}other{D} Why?", form) == [
        "Read: ",
        Document(hostile),
        Document("other"),
        " Why?",
    ]
    prompt = to_text_prompt(f"Read: {hostile} Why?", form)
    assert prompt == ChunkedPrompt("Read: ", [hostile], " Why?")


def test_documents_go_before_the_last_human_text() -> None:
    messages = [
        SystemMessage("s"),
        HumanMessage("first"),
        AIMessage("a"),
        HumanMessage("second"),
        AIMessage("b"),
    ]
    assert contents(*messages, documents=["d1", "d2"]) == [
        ["s"],
        ["first"],
        ["a"],
        [Document("d1"), Document("d2"), "second"],
        ["b"],
    ]
    assert contents(HumanMessage("q"), documents=[]) == [["q"]]
    with pytest.raises(ValueError, match="last human message"):
        to_chat_prompt([SystemMessage("s")], FORM, ["d"])


def test_what_documents_may_be() -> None:
    given = ["text", LangChainDocument("page"), Document("piece"), [1, 2]]
    assert document_contents(given) == ["text", "page", "piece", [1, 2]]
    assert document_contents(None) == []
    with pytest.raises(ValueError, match="one text was given"):
        document_contents("text")
    with pytest.raises(ValueError, match=r"documents\[1\].*not dict"):
        document_contents(["a", {}])


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "audio", "file", "video", None])
def test_anything_but_text_is_refused(kind: str | None) -> None:
    for message in (
        HumanMessage([text("what is this?"), {"type": kind, "url": "x"}]),
        ToolMessage([text("a"), {"type": kind, "url": "x"}], tool_call_id="1"),
    ):
        with pytest.raises(
            ValueError, match=rf"message 1 \({message.type}\), content block 2: type {kind!r}.*text only"
        ):
            to_chat_prompt([message], FORM)


def test_other_bad_messages_are_refused() -> None:
    with pytest.raises(ValueError, match="RemoveMessage"):
        to_chat_prompt([RemoveMessage(id="1")], FORM)
    with pytest.raises(ValueError, match="needs its text under 'text'"):
        to_chat_prompt([HumanMessage([{"type": "document", "title": "x"}])], FORM)
    with pytest.raises(ValueError, match="daric='documents': allowed are text, document, live"):
        to_chat_prompt([HumanMessage([text("x", daric="documents")])], FORM)


@pytest.mark.parametrize("hostile", ["{braces} {{ jinja }}", "<|im_end|>", "a\0b", "lone \ud800", ""])
def test_texts_are_passed_on_unchanged(hostile: str) -> None:
    assert contents(HumanMessage("q"), documents=[hostile]) == [[Document(hostile), "q"]]
    blocks = HumanMessage.model_construct(content=[text(hostile), text("q")])
    assert contents(blocks) == [[Document(hostile), "q"]]


def test_tool_calls_in_both_forms() -> None:
    call = {"name": "add", "args": {"a": 1}, "id": "7", "type": "tool_call"}
    message = AIMessage([text("I add."), {"type": "tool_use", "id": "7", "name": "add"}], tool_calls=[call])
    with_tools = to_chat_prompt([message], PromptFormat(D, template_has_tools=True)).messages[0]
    assert list(with_tools.content) == ["I add."]
    assert with_tools.extra["tool_calls"] == [
        {"id": "7", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert contents(message) == [
        ['I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>']
    ]


def test_tools_go_into_the_system_prompt_if_the_template_knows_none() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    told = to_chat_prompt([HumanMessage("q")], FORM, tools=tools)
    assert told.tools is None
    assert told.messages[0].role == "system"
    assert '"name": "add"' in str(told.messages[0].content)
    merged = to_chat_prompt([SystemMessage("s"), HumanMessage("q")], FORM, tools=tools)
    assert len(merged.messages) == 2
    assert merged.messages[0].content[0] == "s"
    native = to_chat_prompt([HumanMessage("q")], PromptFormat(D, template_has_tools=True), tools=tools)
    assert native.tools == tools
    assert len(native.messages) == 1


def test_artifacts_of_retrieval_tools() -> None:
    documents = [LangChainDocument("one"), LangChainDocument("two")]
    messages = [
        ToolMessage("one\n\ntwo", tool_call_id="1", artifact=documents),
        ToolMessage("x", tool_call_id="2", artifact={"a": 1}),
        HumanMessage("q"),
    ]
    assert artifact_texts(messages) == ["one", "two"]


def test_text_prompts() -> None:
    assert to_text_prompt("plain", FORM) == "plain"
    assert to_text_prompt("q", FORM, ["d"]) == ChunkedPrompt("", ["d"], "q")
    assert to_text_prompt(f"s{D}d{D}\n{D}e{D}q", FORM) == ChunkedPrompt("s", ["d", "e"], "q")
    assert to_text_prompt(f"s{D}d{D}q", FORM, ["e"]) == ChunkedPrompt("s", ["e", "d"], "q")
    assert to_text_prompt(f"{D}d{D}", FORM) == ChunkedPrompt("", ["d"], "")
