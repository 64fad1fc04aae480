"""A retriever's output as a prompt of chunks, and its delimiter-tagged text form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daric_rag.config import DEFAULT_DELIMITER, check_delimiter

Content = str | Sequence[int]
"""Text, or the token ids of a piece."""


@dataclass(frozen=True)
class Live:
    """A piece that is computed in full context and never cached, for example text between two documents."""

    content: Content


@dataclass(frozen=True)
class Document:
    """A piece of a chat message that is a chunk of its own: cached and reused at any position."""

    content: Content


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    `content` is text, or a sequence of text, `Document` and `Live` pieces. `extra` holds what else the
    chat template reads from a message (`name`, `tool_calls`, `tool_call_id`).
    """

    role: str
    content: str | Sequence[str | Document | Live]
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template; its `Document` pieces are reused."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, object]] | None = None


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
        for name in ("system", "query"):
            check_content(name, getattr(self, name))
        if isinstance(self.documents, str | bytes):
            raise ValueError("documents: a sequence of texts is expected, one text was given")
        for number, document in enumerate(self.documents):
            content = document.content if isinstance(document, Live) else document
            check_content(f"documents[{number}]", content)

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


def check_content(name: str, content: object) -> None:
    """Raise `ValueError` naming the part unless it is text or a sequence of non-negative token ids."""
    if isinstance(content, str):
        return
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        for token in content:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise ValueError(f"{name}: token ids must be integers of at least 0, found {token!r}")
        return
    raise ValueError(f"{name}: text or a sequence of token ids is expected, found {type(content).__name__}")


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
