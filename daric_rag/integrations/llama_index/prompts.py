"""LlamaIndex messages, nodes and texts as prompts of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    CitableBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)
from llama_index.core.base.llms.types import ChatMessage as LlamaMessage
from llama_index.core.schema import MetadataMode

from daric_rag.prompt import ChatMessage, ChatPrompt, ChunkedPrompt, Document, Live, has_delimiter
from daric_rag.recognition import Match, split_by_matches

Part = str | Document | Live
Find = Callable[[str], list[Match]]
"""Finds registered documents in a text (`Recognizer.find`)."""

# What chat templates call the roles.
_ROLES = {
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
}
_TEMPLATE_FIELDS = ("name", "tool_calls", "tool_call_id")


def chat_prompt(
    messages: Sequence[LlamaMessage],
    documents: Sequence[Any] | None,
    delimiter: str,
    find: Find | None = None,
) -> ChatPrompt:
    """A conversation with its documents as chunks.

    `documents` come before the text of the last user message. Of a user message of several text blocks all but
    the last are documents, of a tool message all are; so is a citable block. In texts, delimiters separate
    documents. Raises `ValueError` for an empty conversation and for blocks that are not text.
    """
    if not messages:
        raise ValueError("messages: at least one message is needed, none was given")
    converted = [_message(message, delimiter, find) for message in messages]
    if documents:
        _insert(converted, [as_document(item) for item in documents])
    return ChatPrompt(converted)


def as_document(item: Any) -> Document:
    """A text, token ids, a LlamaIndex node (with or without score) or a `Document` as a chunk.

    A node's text is the one that synthesizers put into prompts. Raises `ValueError` for anything else.
    """
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    if hasattr(item, "get_content"):
        return Document(item.get_content(metadata_mode=MetadataMode.LLM))
    if isinstance(item, list | tuple):
        return Document(item)
    raise ValueError(f"documents: texts, token ids or nodes are expected, found {type(item).__name__}")


def text_parts(text: str, delimiter: str, find: Find | None = None) -> list[Part]:
    """A text with delimiters as text, documents, text; without any it is one part.

    A delimiter inside a document that `find` knows is part of that document, not structure.
    """
    if not has_delimiter(text, delimiter):
        return [text]
    matches = [
        match
        for match in (find(text) if find else [])
        if has_delimiter(text[match.start : match.end], delimiter)
    ]
    parts: list[Part] = []
    for piece, is_document in split_by_matches(text, matches):
        parts += [Document(piece)] if is_document else _delimited_parts(piece, delimiter)
    return parts


def _delimited_parts(text: str, delimiter: str) -> list[Part]:
    chunked = ChunkedPrompt.from_text(text, delimiter)
    pieces = [chunked.system, *chunked.documents, chunked.query]
    parts: list[Part] = []
    for number, piece in enumerate(pieces):
        content = piece.content if isinstance(piece, Live) else piece
        if not isinstance(content, str) or not content:
            continue
        # White space between documents needs no chunk: as text the engine turns it into padding.
        if number in (0, len(pieces) - 1) or content.isspace():
            parts.append(content)
        else:
            parts.append(piece if isinstance(piece, Live) else Document(content))
    return parts


def _message(message: LlamaMessage, delimiter: str, find: Find | None) -> ChatMessage:
    role = _ROLES.get(message.role, message.role.value)
    extra = {
        name: message.additional_kwargs[name]
        for name in _TEMPLATE_FIELDS
        if name in message.additional_kwargs
    }
    blocks = [block for block in message.blocks if not isinstance(block, ThinkingBlock | CachePoint)]
    first_text = 0
    if role == "tool" and len(blocks) > 1:
        first_text = len(blocks)
    elif role == "user":
        first_text = len(blocks) - 1
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        if isinstance(block, CitableBlock):
            parts += [Document(_block_text(item)) for item in block.content]
        elif number < first_text:
            parts.append(Document(_block_text(block)))
        else:
            if parts and isinstance(parts[-1], str):
                parts.append("\n")  # as LlamaIndex joins the text blocks of a message
            parts += text_parts(_block_text(block), delimiter, find)
    return ChatMessage(role, parts, extra)


def _block_text(block: Any) -> str:
    if isinstance(block, TextBlock):
        return block.text
    kind = getattr(block, "block_type", type(block).__name__)
    raise ValueError(f"a message has a block of type {kind!r}: the model takes text blocks only")


def _insert(messages: list[ChatMessage], documents: Sequence[Document]) -> None:
    """Put documents at the start of the last user message, or of the last message if no user speaks."""
    users = [number for number, message in enumerate(messages) if message.role == "user"]
    number = users[-1] if users else len(messages) - 1
    message = messages[number]
    messages[number] = ChatMessage(message.role, [*documents, *message.content], message.extra)
