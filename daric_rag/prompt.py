"""A retriever's output as a prompt of chunks, and its delimiter-tagged text form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

from daric_rag.config import DEFAULT_DELIMITER, check_delimiter

Content = str | Sequence[int]
"""Text, or the token ids of a piece: any sequence or array of integers, kept as a tuple."""


@dataclass(frozen=True)
class Live:
    """A piece that is computed in full context and never cached, for example text between two documents."""

    content: Content

    def __post_init__(self) -> None:
        _keep(self, content=checked_content("Live.content", self.content))


@dataclass(frozen=True)
class Document:
    """A piece of a chat message that is a chunk of its own: cached and reused at any position."""

    content: Content

    def __post_init__(self) -> None:
        _keep(self, content=checked_content("Document.content", self.content))


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    `content` is text, or a sequence of text, `Document` and `Live` pieces. `extra` holds what else the
    chat template reads from a message (`name`, `tool_calls`, `tool_call_id`).
    """

    role: str
    content: str | Sequence[str | Document | Live]
    extra: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check("ChatMessage.role", self.role, "a text", str)
        _check("ChatMessage.extra", self.extra, "a mapping", Mapping)
        if isinstance(self.content, str):
            return
        for number, piece in enumerate(
            items_of("ChatMessage.content", self.content, "text or a list of pieces")
        ):
            _check(f"ChatMessage.content[{number}]", piece, "a text, Document or Live", str, Document, Live)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template; its `Document` pieces are reused."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, object]] | None = None

    def __post_init__(self) -> None:
        messages = items_of("ChatPrompt.messages", self.messages, "a sequence of ChatMessage")
        if not messages:
            raise ValueError("ChatPrompt.messages: a conversation has at least one message, none was given")
        for number, message in enumerate(messages):
            _check(f"ChatPrompt.messages[{number}]", message, "a ChatMessage", ChatMessage)
        if self.tools is not None:
            items_of("ChatPrompt.tools", self.tools, "a sequence of tools")


@dataclass(frozen=True)
class ChunkedPrompt:
    """System prompt, documents, query: the chunked prompt of the paper (§3.1).

    Every part is text or a sequence of token ids; a `Live` among the documents is computed in full context
    and never cached. With a chat model the chat template is put around the chunks, unless `formatted` says that
    system prompt and query are in the model's own format already: control tokens in these two count then.

    >>> ChunkedPrompt(system="Answer briefly.", documents=["Paris is in France."], query="Where is Paris?")
    """

    system: Content = ""
    documents: Sequence[Content | Live] = ()
    query: Content = ""
    formatted: bool = False

    def __post_init__(self) -> None:
        documents = items_of("documents", self.documents, "a sequence of documents")
        _keep(
            self,
            system=checked_content("system", self.system),
            query=checked_content("query", self.query),
            documents=tuple(
                one if isinstance(one, Live) else checked_content(f"documents[{number}]", one)
                for number, one in enumerate(documents)
            ),
        )

    def to_text(self, delimiter: str = DEFAULT_DELIMITER) -> str:
        """Return the prompt as one text; `from_text` gives back an equal prompt (`formatted` is not in the text).

        Raises `ValueError` for a part given as token ids, which text cannot carry.
        """
        check_delimiter(delimiter)
        parts = [_escape(_text("system", self.system), delimiter)]
        for number, document in enumerate(self.documents):
            live = isinstance(document, Live)
            content = document.content if isinstance(document, Live) else document
            parts.append(_live_delimiter(delimiter) if live else delimiter)
            parts.append(_escape(_text(f"documents[{number}]", content), delimiter))
        parts += [delimiter, _escape(_text("query", self.query), delimiter)]
        return "".join(parts)

    @classmethod
    def from_text(cls, text: str, delimiter: str = DEFAULT_DELIMITER) -> ChunkedPrompt:
        """Split a delimiter-tagged text: system prompt, documents, query; without a delimiter all is query."""
        check_delimiter(delimiter)
        pattern = f"({re.escape(_live_delimiter(delimiter))}|{re.escape(delimiter)})"
        pieces = re.split(pattern, text)
        texts = [_unescape(piece, delimiter) for piece in pieces[0::2]]
        if len(texts) == 1:
            return cls(query=texts[0])
        lives = [separator != delimiter for separator in pieces[1::2]]
        documents = [Live(text) if live else text for text, live in zip(texts[1:-1], lives, strict=False)]
        return cls(system=texts[0], documents=tuple(documents), query=texts[-1])


def has_delimiter(text: str, delimiter: str = DEFAULT_DELIMITER) -> bool:
    """Return whether `text` is in the delimiter-tagged form."""
    return delimiter in text or _live_delimiter(delimiter) in text


def checked_content(place: str, content: object) -> str | tuple[int, ...]:
    """Return text as it is, and token ids, in whatever sequence or array they come, as a tuple of Python integers.

    This is the one check of what a caller may write for a text or for token ids; the vocabulary is checked where
    the model is known. Raises `ValueError` naming the place and the value.
    """
    if isinstance(content, str):
        return content
    tokens = items_of(place, content, "text or a sequence of token ids")
    return tuple(_token_id(place, number, token) for number, token in enumerate(tokens))


def items_of(place: str, value: Any, expected: str) -> list[Any]:
    """Return the items of a sequence or array. Raises `ValueError` for anything else, texts and bytes included.

    What is passed through only once (a generator) or has no order (a set) is refused as well: a prompt is read
    more than once.
    """
    # An array or tensor of any library gives plain Python numbers this way; a memory view of bytes does not count.
    items = value.tolist() if hasattr(value, "tolist") and not isinstance(value, memoryview) else value
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray | memoryview):
        raise ValueError(f"{place}: {expected} is expected, found {_shown(value)}")
    return list(items)


def _token_id(place: str, number: int, token: Any) -> int:
    # bool is an integer to Python, but not what anybody means by a token.
    if type(token) is not int and (isinstance(token, bool) or not hasattr(token, "__index__")):
        raise ValueError(f"{place}[{number}]: a token id is an integer, found {_shown(token)}")
    token_id = index(token)
    if token_id < 0:
        raise ValueError(f"{place}[{number}]: token ids are integers of at least 0, found {token_id}")
    return token_id


def _check(place: str, value: object, expected: str, *types: type) -> None:
    if not isinstance(value, types):
        raise ValueError(f"{place}: {expected} is expected, found {_shown(value)}")


def _keep(frozen: object, **values: object) -> None:
    """Set fields of a frozen dataclass while it is made."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def _shown(value: object) -> str:
    """The value and its type, short enough for a message."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


# A delimiter is its first character `h` and its rest `t`. `h!t` starts a live piece. In a piece's own text,
# `h`, any backslashes, an optional `!`, then `t` gets one more backslash, so no piece can contain a delimiter.


def _live_delimiter(delimiter: str) -> str:
    return f"{delimiter[0]}!{delimiter[1:]}"


def _escape(text: str, delimiter: str) -> str:
    head, tail = re.escape(delimiter[0]), re.escape(delimiter[1:])
    return re.sub(rf"({head})(\\*!?{tail})", r"\1\\\2", text)


def _unescape(text: str, delimiter: str) -> str:
    head, tail = re.escape(delimiter[0]), re.escape(delimiter[1:])
    return re.sub(rf"({head})\\(\\*!?{tail})", r"\1\2", text)


def _text(name: str, content: Content) -> str:
    if not isinstance(content, str):
        raise ValueError(f"{name}: token ids have no text form")
    return content
