"""From LangChain messages to a `ChatPrompt` whose documents are pieces of their own."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import (
    ChatMessage as RoleMessage,
)

from daric_rag.integrations.langchain.tools import tool_call_text, tools_text
from daric_rag.prompt import ChatMessage, ChatPrompt, ChunkedPrompt, Content, Document, Live, has_delimiter
from daric_rag.recognition import Match, split_by_matches

Piece = str | Document | Live
Find = Callable[[str], Sequence[Match]]
"""Finds the known documents in a text (`Recognizer.find`)."""

# Blocks of a model's own message that are no text of the conversation.
_NOT_TEXT = frozenset(
    {"tool_use", "tool_call", "tool_call_chunk", "thinking", "reasoning", "redacted_thinking"}
)
_TEXT_TYPES = "text, text-plain, document"


@dataclass(frozen=True)
class PromptFormat:
    """What of the engine a prompt's form depends on.

    `template_has_tools`: the model's chat template renders tools; if not, they are put into the text.
    """

    delimiter: str
    template_has_tools: bool = False
    find: Find | None = None


def to_chat_prompt(
    messages: Sequence[BaseMessage],
    form: PromptFormat,
    documents: Sequence[Content] = (),
    tools: Sequence[dict[str, Any]] = (),
) -> ChatPrompt:
    """Convert messages; `documents` go before the text of the last human message.

    Which parts of a message are documents: blocks marked as such (`{"type": "document", "text": …}` or
    `{"type": "text", "text": …, "daric": "document"}`); without marks, every text block of a human message but
    the last, and every text block of a tool message; and what stands between delimiters in a plain text.

    Raises `ValueError` for blocks that are not text, naming the message and the block.
    """
    converted = [_convert(message, number, form) for number, message in enumerate(messages)]
    if documents:
        place = _last_human(messages)
        pieces = [Document(document) for document in documents]
        converted[place] = replace(converted[place], content=[*pieces, *converted[place].content])
    if tools and not form.template_has_tools:
        return ChatPrompt(_with_tools(converted, tools_text(tools)))
    return ChatPrompt(converted, list(tools) or None)


def to_text_prompt(text: str, form: PromptFormat, documents: Sequence[Content] = ()) -> str | ChunkedPrompt:
    """A prompt of a completion model: the text as it is, or chunks if it has delimiters or documents."""
    if not documents and not has_delimiter(text, form.delimiter):
        return text
    pieces = split_delimited(text, form)
    if pieces == [text] and has_delimiter(text, form.delimiter):
        # All delimiters are inside known documents; the engine would take them for its own.
        pieces = _recognised(text, form)
    system = pieces.pop(0) if len(pieces) > 1 and isinstance(pieces[0], str) else ""
    query = pieces.pop() if pieces and isinstance(pieces[-1], str) else ""
    between = [_chunk(piece) for piece in pieces]
    return ChunkedPrompt(str(system), [*documents, *between], str(query))


def document_contents(documents: Iterable[Any] | None) -> list[Content]:
    """What `documents=` accepts: texts, token ids, LangChain documents, `Document` pieces.

    Raises `ValueError` naming the position and type of anything else.
    """
    if documents is None:
        return []
    if isinstance(documents, str | bytes):
        raise ValueError("documents: a list of documents is expected, one text was given")
    return [_document_content(number, document) for number, document in enumerate(documents)]


def artifact_texts(messages: Sequence[BaseMessage]) -> list[str]:
    """Texts of the documents that a retrieval tool attached to its result (`ToolMessage.artifact`)."""
    texts = []
    for message in messages:
        artifact = getattr(message, "artifact", None)
        if isinstance(artifact, list | tuple):
            texts += [
                item.page_content for item in artifact if isinstance(getattr(item, "page_content", 0), str)
            ]
    return texts


def split_delimited(text: str, form: PromptFormat) -> list[Piece]:
    """Cut a text at its delimiters: text, documents, text. White space between documents is dropped.

    A delimiter inside a document that is known (recognised) is part of the document.
    """
    if not has_delimiter(text, form.delimiter):
        return [text] if text else []
    masked, originals = _mask_known(text, form)
    if not has_delimiter(masked, form.delimiter):
        return [text]
    prompt = ChunkedPrompt.from_text(masked, form.delimiter)
    pieces: list[Piece] = [str(prompt.system)]
    pieces += [item if isinstance(item, Live) else Document(item) for item in prompt.documents]
    pieces.append(str(prompt.query))
    return [_unmask(piece, originals) for piece in pieces if not _is_blank(piece)]


# ---- one message ----


def _convert(message: BaseMessage, number: int, form: PromptFormat) -> ChatMessage:
    where = f"message {number + 1} ({message.type})"
    if isinstance(message, AIMessage):
        return _assistant(message, where, form)
    if isinstance(message, ToolMessage | FunctionMessage):
        return _tool_result(message, where, form)
    extra = {"name": message.name} if message.name else {}
    return ChatMessage(_role(message, where), _pieces(message, where, form), extra)


def _role(message: BaseMessage, where: str) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, RoleMessage):
        return message.role
    raise ValueError(f"{where}: {type(message).__name__} is no message that a model can read")


def _assistant(message: AIMessage, where: str, form: PromptFormat) -> ChatMessage:
    text = "\n".join(block.content for block in _blocks(message, where) if isinstance(block, _Text))
    if not message.tool_calls:
        return ChatMessage("assistant", [text] if text else [])
    if not form.template_has_tools:
        calls = [tool_call_text(call["name"], call["args"]) for call in message.tool_calls]
        return ChatMessage("assistant", ["\n".join([text, *calls] if text else calls)])
    tool_calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["args"]}}
        for call in message.tool_calls
    ]
    return ChatMessage("assistant", [text] if text else [], {"tool_calls": tool_calls})


def _tool_result(message: ToolMessage | FunctionMessage, where: str, form: PromptFormat) -> ChatMessage:
    pieces = _pieces(message, where, form)
    if not form.template_has_tools:
        return ChatMessage("user", ["<tool_response>\n", *pieces, "\n</tool_response>"])
    extra = {"name": message.name} if message.name else {}
    if isinstance(message, ToolMessage):
        extra["tool_call_id"] = message.tool_call_id
    return ChatMessage("tool", pieces, extra)


def _pieces(message: BaseMessage, where: str, form: PromptFormat) -> list[Piece]:
    if isinstance(message.content, str):
        return split_delimited(message.content, form)
    blocks = _blocks(message, where)
    if not any(block.kind != "text" for block in blocks):
        if isinstance(message, ToolMessage | FunctionMessage):
            blocks = [replace(block, kind="document") for block in blocks]
        elif isinstance(message, HumanMessage):
            blocks = [*(replace(block, kind="document") for block in blocks[:-1]), *blocks[-1:]]
    pieces: list[Piece] = []
    for block in blocks:
        if block.kind == "document":
            pieces.append(Document(block.content))
        elif block.kind == "live":
            pieces.append(Live(block.content))
        else:
            if pieces and isinstance(pieces[-1], str):
                pieces.append("\n")
            pieces += split_delimited(block.content, form)
    return pieces


# ---- content blocks ----


@dataclass(frozen=True)
class _Text:
    """A text block; `kind` is text, document or live."""

    content: str
    kind: str = "text"


def _blocks(message: BaseMessage, where: str) -> list[_Text]:
    if isinstance(message.content, str):
        return [_Text(message.content)] if message.content else []
    blocks = [_block(block, f"{where}, content block {n + 1}") for n, block in enumerate(message.content)]
    return [block for block in blocks if block is not None]


def _block(block: str | dict[Any, Any], where: str) -> _Text | None:
    if isinstance(block, str):
        return _Text(block)
    kind = block.get("type")
    if kind in _NOT_TEXT:
        return None
    if kind in ("text", "text-plain", "document"):
        text = _block_text(block)
        if text is None:
            raise ValueError(f"{where}: a block of type {kind!r} needs its text under 'text'")
        mark = block.get("daric", "text" if kind == "text" else "document")
        if mark not in ("text", "document", "live"):
            raise ValueError(f"{where}: daric={mark!r}: allowed are text, document, live")
        return _Text(text, mark)
    raise ValueError(f"{where}: type {kind!r} cannot be read, the model takes text only ({_TEXT_TYPES})")


def _block_text(block: dict[Any, Any]) -> str | None:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        block = {"text": source.get("data")}
    text = block.get("text", block.get("page_content"))
    return text if isinstance(text, str) else None


# ---- documents ----


def _document_content(number: int, document: Any) -> Content:
    if isinstance(document, Document):
        return document.content
    text = getattr(document, "page_content", document)
    if isinstance(text, str):
        return text
    if isinstance(text, list | tuple) and all(isinstance(token, int) for token in text):
        return text
    raise ValueError(
        f"documents[{number}]: a text, token ids or a LangChain Document is expected, not {type(document).__name__}"
    )


def _last_human(messages: Sequence[BaseMessage]) -> int:
    for number in reversed(range(len(messages))):
        if isinstance(messages[number], HumanMessage):
            return number
    raise ValueError("documents: they go before the text of the last human message, but there is none")


def _with_tools(messages: Sequence[ChatMessage], text: str) -> list[ChatMessage]:
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=[*first.content, f"\n\n{text}"]), *messages[1:]]
    return [ChatMessage("system", [text]), *messages]


def _mask_known(text: str, form: PromptFormat) -> tuple[str, dict[str, str]]:
    """Replace the known documents that have a delimiter in them by marks; (text, mark -> document)."""
    originals: dict[str, str] = {}
    parts: list[str] = []
    position = 0
    for match in form.find(text) if form.find is not None else ():
        document = text[match.start : match.end]
        if has_delimiter(document, form.delimiter):
            mark = f"known{secrets.token_hex(8)}"
            originals[mark] = document
            parts += [text[position : match.start], mark]
            position = match.end
    return "".join([*parts, text[position:]]), originals


def _recognised(text: str, form: PromptFormat) -> list[Piece]:
    """Text, known documents and the text between them."""
    matches = form.find(text) if form.find is not None else ()
    pieces = split_by_matches(text, matches)
    ends = (0, len(pieces) - 1)
    return [
        Document(piece) if is_document else piece if number in ends else Live(piece)
        for number, (piece, is_document) in enumerate(pieces)
        if is_document or number in ends or piece.strip()
    ]


def _chunk(piece: Piece) -> Content | Live:
    return piece.content if isinstance(piece, Document) else piece


def _unmask(piece: Piece, originals: dict[str, str]) -> Piece:
    content = piece if isinstance(piece, str) else piece.content
    assert isinstance(content, str)
    for mark, document in originals.items():
        content = content.replace(mark, document)
    return content if isinstance(piece, str) else replace(piece, content=content)


def _is_blank(piece: Piece) -> bool:
    if isinstance(piece, str):
        return not piece
    return isinstance(piece, Document) and isinstance(piece.content, str) and not piece.content.strip()
