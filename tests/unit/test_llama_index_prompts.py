"""LlamaIndex messages as chat prompts: roles, blocks, documents, delimiters."""

import pytest
from llama_index.core.base.llms.types import ChatMessage as LlamaMessage
from llama_index.core.base.llms.types import CitableBlock, ImageBlock, MessageRole, TextBlock, ThinkingBlock
from llama_index.core.schema import NodeWithScore, TextNode

from daric_rag.integrations.llama_index.prompts import as_document, chat_prompt, text_parts
from daric_rag.prompt import ChatMessage, Document, Live
from daric_rag.recognition import Recognizer

D = "<|daric|>"


def user(*blocks):
    return LlamaMessage(role=MessageRole.USER, blocks=list(blocks))


def converted(*messages, documents=None, find=None):
    return list(chat_prompt(messages, documents, D, find).messages)


def test_roles_get_the_names_of_chat_templates():
    roles = {
        MessageRole.SYSTEM: "system",
        MessageRole.DEVELOPER: "system",
        MessageRole.USER: "user",
        MessageRole.ASSISTANT: "assistant",
        MessageRole.CHATBOT: "assistant",
        MessageRole.MODEL: "assistant",
        MessageRole.TOOL: "tool",
        MessageRole.FUNCTION: "tool",
    }
    for role, expected in roles.items():
        assert converted(LlamaMessage(role=role, content="x")) == [ChatMessage(expected, ["x"])]


def test_what_templates_read_of_a_message_is_passed_on():
    message = LlamaMessage(
        role=MessageRole.TOOL, content="42", additional_kwargs={"tool_call_id": "a1", "other": 3}
    )
    assert converted(message) == [ChatMessage("tool", ["42"], {"tool_call_id": "a1"})]


def test_documents_stand_before_the_last_user_message():
    messages = converted(
        LlamaMessage(role=MessageRole.SYSTEM, content="s"),
        LlamaMessage(role=MessageRole.USER, content="first"),
        LlamaMessage(role=MessageRole.ASSISTANT, content="a"),
        LlamaMessage(role=MessageRole.USER, content="last"),
        documents=["one", "two"],
    )
    assert [message.content for message in messages] == [
        ["s"],
        ["first"],
        ["a"],
        [Document("one"), Document("two"), "last"],
    ]


def test_documents_may_be_nodes_and_take_the_form_of_synthesizers():
    node = TextNode(text="body", metadata={"title": "T"}, excluded_llm_metadata_keys=[])
    expected = Document("title: T\n\nbody")
    assert as_document(node) == expected
    assert as_document(NodeWithScore(node=node, score=0.5)) == expected
    assert as_document([1, 2, 3]) == Document([1, 2, 3])
    with pytest.raises(ValueError, match=r"documents: .* found float"):
        as_document(0.5)


def test_of_several_text_blocks_all_but_the_last_are_documents():
    message = user(TextBlock(text="one"), TextBlock(text="two"), TextBlock(text="query"))
    assert converted(message)[0].content == [Document("one"), Document("two"), "query"]


def test_all_blocks_of_a_tool_message_are_documents():
    blocks = [TextBlock(text="one"), TextBlock(text="two")]
    message = LlamaMessage(role=MessageRole.TOOL, blocks=blocks)
    assert converted(message)[0].content == [Document("one"), Document("two")]


def test_text_blocks_of_other_roles_are_joined_as_by_llama_index():
    blocks = [TextBlock(text="one"), TextBlock(text="two")]
    message = LlamaMessage(role=MessageRole.SYSTEM, blocks=blocks)
    assert "".join(converted(message)[0].content) == message.content


def test_a_citable_block_is_a_document_and_thoughts_are_left_out():
    citable = CitableBlock(title="T", source="S", content=[TextBlock(text="body")])
    message = user(citable, ThinkingBlock(content="hm"), TextBlock(text="query"))
    assert converted(message)[0].content == [Document("body"), "query"]


def test_an_image_is_refused_by_name():
    with pytest.raises(ValueError, match="block of type 'image': the model takes text blocks only"):
        converted(user(ImageBlock(image=b"\x89PNG"), TextBlock(text="what is this?")))


def test_an_empty_conversation_is_refused():
    with pytest.raises(ValueError, match="messages: at least one"):
        converted()


def test_delimiters_separate_documents():
    text = f"before{D}one{D}two<!|daric|> between {D}three{D}after"
    assert text_parts(text, D) == [
        "before",
        Document("one"),
        Document("two"),
        Live(" between "),
        Document("three"),
        "after",
    ]


def test_white_space_between_delimiters_is_no_document():
    assert text_parts(f"a{D}one{D}\n{D}two{D} b", D) == ["a", Document("one"), "\n", Document("two"), " b"]


def test_text_without_delimiters_stays_whole():
    assert text_parts("no structure", D) == ["no structure"]


def test_a_delimiter_inside_a_known_document_is_data():
    document = f"A manual that explains {D} as a way to separate texts in prompts, with many examples."
    recognizer = Recognizer()
    recognizer.register([document])
    text = f"Context:\n{document}\n{D}other{D}Question"
    assert text_parts(text, D, recognizer.find) == [
        "Context:\n",
        Document(document),
        "\n",
        Document("other"),
        "Question",
    ]


def test_recognition_does_not_cut_what_delimiters_hold_together():
    inner = "The lighthouse of Harrow Island was built in the year 1871 by two brothers."
    recognizer = Recognizer()
    recognizer.register([inner])
    whole = f"Preface. {inner} Epilogue."
    assert text_parts(f"{D}{whole}{D}q", D, recognizer.find) == [Document(whole), "q"]
