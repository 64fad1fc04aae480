"""From a prompt to padded token ids and the chunk layout (DESIGN: one request, end to end, step 1).

Every chunk is tokenised on its own, without special tokens, and padded at its end to a block boundary, so its
token ids, hence its key, never depend on what stands beside it. Text of documents, queries and messages is data:
what looks like a control token in it is tokenised as ordinary characters. Only the chat template's own text is
control.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine.token_ranges import TokenRange
from daric_rag.engine.tokenizer import ExclusiveTokenizer
from daric_rag.prompt import (
    ChatMessage,
    ChatPrompt,
    ChunkedPrompt,
    Content,
    Document,
    Live,
    checked_content,
    has_delimiter,
)

Prompt = str | Sequence[int] | ChunkedPrompt | ChatPrompt
Split = Callable[[str], list[tuple[str, bool]]]
"""Splits a text into (piece, is a known document); used for recognition."""


@dataclass(frozen=True)
class _Piece:
    """A part of a prompt in order; `kind` is text, document or live; `control` text comes from a template.

    `place`: what the caller calls it.
    """

    content: Content
    kind: str = "text"
    control: bool = False
    place: str = "prompt"


@dataclass(frozen=True)
class ProcessedPrompt:
    """What is sent to vLLM.

    `bounds` and `live` are the chunk layout, empty for a prompt without documents. `documents`: ranges of the
    document chunks. `padding_tokens`: newline tokens added; they count as prompt tokens.
    """

    token_ids: list[int]
    bounds: tuple[TokenRange, ...] = ()
    live: tuple[bool, ...] = ()
    documents: tuple[TokenRange, ...] = ()
    padding_tokens: int = 0
    dropped_documents: int = 0
    recognised_documents: int = 0


@dataclass
class _Chunk:
    token_ids: list[int] = field(default_factory=list)
    live: bool = False
    is_document: bool = False


class InputProcessor:
    """Turns prompts into token ids for one model; safe to call from several threads.

    `block_size`: tokens per KV block. `max_model_len`: the model's window in tokens.
    """

    def __init__(
        self, tokenizer: Any, block_size: int, max_model_len: int, vocab_size: int, padding: str
    ) -> None:
        self._tokenizer = ExclusiveTokenizer(tokenizer)
        self._block_size = block_size
        self._max_model_len = max_model_len
        # The engine must be able to generate at least one token.
        self._longest = max_model_len - 1
        self._vocab_size = vocab_size
        self._placeholder = f"piece{secrets.token_hex(8)}n"
        self.has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self._bos = self._leading_special_tokens()
        self._padding_id = self._padding_token(padding)

    def process(self, prompt: Prompt, config: DaricConfig, split: Split | None = None) -> ProcessedPrompt:
        """Tokenise, pad and lay out a prompt.

        One that only its padding makes too long comes back without padding and layout: vLLM answers it as any
        other prompt. Raises `ValueError` for what is no prompt, an empty one, one that is longer than the model's
        window (naming both numbers and the largest chunk), and token ids outside the vocabulary.
        """
        pieces, recognised = self._pieces(prompt, config, split)
        chunks, dropped = self._chunks(pieces, config)
        processed = self._lay_out(chunks, dropped, recognised)
        num_tokens = len(processed.token_ids)
        if num_tokens > self._longest >= num_tokens - processed.padding_tokens:
            token_ids = [token for chunk in chunks for token in chunk.token_ids]
            return ProcessedPrompt(token_ids, dropped_documents=dropped, recognised_documents=recognised)
        self._check_length(processed)
        return processed

    def warm_chunk(self, document: Content, place: str = "document") -> ProcessedPrompt:
        """The chunk that a document becomes in any prompt, on its own; no token ids for an empty document.

        `place`: what an error calls it.
        """
        token_ids = self._padded(self._document_ids(checked_content(place, document), place))
        bounds = ((0, len(token_ids)),)
        processed = ProcessedPrompt(token_ids, bounds, (False,), bounds)
        self._check_length(processed)
        return processed

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """Token ids of a text, no special tokens added; control tokens in it only count with `control`."""
        encoded = self._tokenizer(
            repair_surrogates(text), add_special_tokens=False, split_special_tokens=not control
        )
        return list(encoded["input_ids"])

    # ---- pieces ----

    def _pieces(self, prompt: Prompt, config: DaricConfig, split: Split | None) -> tuple[list[_Piece], int]:
        if isinstance(prompt, str) and has_delimiter(prompt, config.delimiter):
            prompt = ChunkedPrompt.from_text(prompt, config.delimiter)
        if isinstance(prompt, str):
            # A plain text prompt is a completion: as in vLLM, it may hold control tokens; documents may not.
            return _recognise([_Piece(prompt, control=True)], split)
        if isinstance(prompt, ChatPrompt):
            return _recognise(self._chat_pieces(prompt), split)
        if isinstance(prompt, ChunkedPrompt):
            return self._chunked_pieces(prompt), 0
        return [_Piece(checked_content("prompt", prompt))], 0

    def _chunked_pieces(self, prompt: ChunkedPrompt) -> list[_Piece]:
        documents = [_document_piece(item, f"documents[{n}]") for n, item in enumerate(prompt.documents)]
        system = _Piece(prompt.system, control=prompt.formatted, place="system")
        query = _Piece(prompt.query, control=prompt.formatted, place="query")
        if prompt.formatted or not self.has_chat_template:
            return [system, *documents, query]
        marks = [f"{self._placeholder}{number}e" for number in range(2)]
        messages = [{"role": "user", "content": marks[1]}]
        if len(prompt.system):
            messages.insert(0, {"role": "system", "content": marks[0]})
        rendered = self._render(messages, None)
        return self._substitute(rendered, {marks[0]: [system], marks[1]: [*documents, query]})

    def _chat_pieces(self, prompt: ChatPrompt) -> list[_Piece]:
        if not self.has_chat_template:
            raise ValueError("this model has no chat template; use a ChunkedPrompt or a text prompt")
        texts: dict[str, list[_Piece]] = {}
        messages: list[dict[str, Any]] = []
        for number, message in enumerate(prompt.messages):
            mark = f"{self._placeholder}{number}e"
            texts[mark] = _message_pieces(message, f"messages[{number}].content")
            content = mark if texts[mark] else ""
            messages.append({**message.extra, "role": message.role, "content": content})
        return self._substitute(self._render(messages, prompt.tools), texts)

    def _render(self, messages: list[dict[str, Any]], tools: Any) -> str:
        def render(them: list[dict[str, Any]]) -> str:
            try:
                text = self._tokenizer.apply_chat_template(
                    them, tools=tools, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # templates refuse by raising what they like
                raise ValueError(f"the model's chat template refuses this conversation: {error}") from error
            return str(text)

        if messages[0]["role"] != "system" or len(messages) < 2 or messages[1]["role"] != "user":
            return render(messages)
        # A template without a place for a system message refuses it, or leaves it out.
        with contextlib.suppress(ValueError):
            rendered = render(messages)
            if messages[0]["content"] in rendered:
                return rendered
        system, user, *rest = messages
        merged = {**user, "content": f"{system['content']}\n\n{user['content']}"}
        return render([merged, *rest])

    def _substitute(self, rendered: str, texts: dict[str, list[_Piece]]) -> list[_Piece]:
        """Replace the placeholders in a rendered template by the pieces they stand for."""
        pieces: list[_Piece] = []
        rest = rendered
        while (begin := rest.find(self._placeholder)) >= 0:
            end = rest.index("e", begin + len(self._placeholder)) + 1
            pieces.append(_Piece(rest[:begin], control=True))
            pieces += texts[rest[begin:end]]
            rest = rest[end:]
        pieces.append(_Piece(rest, control=True))
        return pieces

    # ---- chunks ----

    def _chunks(self, pieces: Sequence[_Piece], config: DaricConfig) -> tuple[list[_Chunk], int]:
        """Group the pieces: text before the first document, documents, live pieces, text after the last one."""
        last_document = max((n for n, piece in enumerate(pieces) if piece.kind == "document"), default=-1)
        chunks = [_Chunk(list(self._bos) if self._needs_bos(pieces) else [])]
        dropped = 0
        for number, piece in enumerate(pieces):
            is_document = piece.kind == "document"
            token_ids = (
                self._document_ids(piece.content, piece.place) if is_document else self._piece_ids(piece)
            )
            if is_document:
                dropped += not token_ids
                chunks.append(_Chunk(token_ids, is_document=True))
            elif number > last_document >= 0:
                if chunks[-1].is_document or number == last_document + 1:
                    chunks.append(_Chunk(live=not config.cache_query))
                chunks[-1].token_ids += token_ids
            elif piece.kind == "live":
                chunks.append(_Chunk(token_ids, live=True))
            elif len(chunks) == 1:
                chunks[0].token_ids += token_ids
            elif not (isinstance(piece.content, str) and piece.content.isspace()):
                # White space between two documents needs no tokens: padding is white space already.
                chunks.append(_Chunk(token_ids, live=True))
        return [chunk for chunk in chunks if chunk.token_ids], dropped

    def _lay_out(self, chunks: Sequence[_Chunk], dropped: int, recognised: int) -> ProcessedPrompt:
        if not chunks:
            raise ValueError("the prompt is empty: it has no system prompt, no document and no query")
        token_ids: list[int] = []
        bounds: list[TokenRange] = []
        padding = 0
        has_documents = any(chunk.is_document for chunk in chunks)
        for number, chunk in enumerate(chunks):
            is_last = number == len(chunks) - 1
            padded = chunk.token_ids if is_last or not has_documents else self._padded(chunk.token_ids)
            padding += len(padded) - len(chunk.token_ids)
            bounds.append((len(token_ids), len(token_ids) + len(padded)))
            token_ids += padded
        if not has_documents:
            return ProcessedPrompt(token_ids, dropped_documents=dropped)
        documents = tuple(bound for bound, chunk in zip(bounds, chunks, strict=True) if chunk.is_document)
        live = tuple(chunk.live for chunk in chunks)
        return ProcessedPrompt(token_ids, tuple(bounds), live, documents, padding, dropped, recognised)

    def _padded(self, token_ids: list[int]) -> list[int]:
        """p = (b - (t mod b)) mod b padding tokens at the chunk's end (paper §3.2)."""
        return token_ids + [self._padding_id] * (-len(token_ids) % self._block_size)

    def _document_ids(self, document: Content, place: str) -> list[int]:
        """A document's tokens. Templates strip and join with white space, which must not change its key."""
        return self._piece_ids(
            _Piece(document.strip() if isinstance(document, str) else document, place=place)
        )

    def _piece_ids(self, piece: _Piece) -> list[int]:
        if isinstance(piece.content, str):
            return self.tokenize(piece.content, control=piece.control)
        for number, token in enumerate(piece.content):
            if token >= self._vocab_size:
                raise ValueError(
                    f"{piece.place}[{number}]: token id {token} is outside the vocabulary of "
                    f"{self._vocab_size} tokens"
                )
        return list(piece.content)

    def _check_length(self, processed: ProcessedPrompt) -> None:
        if len(processed.token_ids) <= self._longest:
            return
        bounds = processed.bounds or ((0, len(processed.token_ids)),)
        number, (start, end) = max(enumerate(bounds), key=lambda item: item[1][1] - item[1][0])
        raise ValueError(
            f"the prompt has {len(processed.token_ids)} tokens, the model takes at most {self._longest} "
            f"(max_model_len={self._max_model_len}); its largest chunk is number {number + 1} of {len(bounds)} "
            f"with {end - start} tokens"
        )

    def _padding_token(self, padding: str) -> int:
        token_ids = self.tokenize(padding)
        if len(token_ids) > 1:
            # SentencePiece puts a space before a text; inside a text the padding may still be one token.
            before, together = self.tokenize("a"), self.tokenize("a" + padding)
            if together[: len(before)] == before:
                token_ids = together[len(before) :]
        if len(token_ids) != 1:
            raise ValueError(
                f"padding={padding!r}: must be a single token of the model, it is {len(token_ids)}"
            )
        return token_ids[0]

    def _leading_special_tokens(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text (BOS), which only a prompt's beginning may have."""
        ids = list(self._tokenizer("x")["input_ids"])
        plain = list(self._tokenizer("x", add_special_tokens=False)["input_ids"])
        position = next((n for n in range(len(ids)) if ids[n : n + len(plain)] == plain), 0)
        return tuple(ids[:position])

    def _needs_bos(self, pieces: Sequence[_Piece]) -> bool:
        first = pieces[0] if pieces else None
        if first is None or not self._bos or not isinstance(first.content, str):
            # Token ids are taken as they are.
            return False
        head = self.tokenize(first.content, control=first.control)[: len(self._bos)]
        return tuple(head) != self._bos


def repair_surrogates(text: str) -> str:
    """The text with lone surrogates, which no tokenizer can encode, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _document_piece(part: Content | Document | Live, place: str) -> _Piece:
    if isinstance(part, Live):
        return _Piece(part.content, "live", place=place)
    return _Piece(part.content if isinstance(part, Document) else part, "document", place=place)


def _message_pieces(message: ChatMessage, place: str) -> list[_Piece]:
    if isinstance(message.content, str):
        return [_Piece(message.content, place=place)] if message.content else []
    return [
        _Piece(part) if isinstance(part, str) else _document_piece(part, f"{place}[{number}]")
        for number, part in enumerate(message.content)
    ]


def _recognise(pieces: Sequence[_Piece], split: Split | None) -> tuple[list[_Piece], int]:
    """Turn known documents inside text pieces into document pieces."""
    if split is None:
        return list(pieces), 0
    result: list[_Piece] = []
    count = 0
    for piece in pieces:
        if piece.kind != "text" or not isinstance(piece.content, str):
            result.append(piece)
            continue
        for text, is_document in split(piece.content):
            count += is_document
            result.append(_Piece(text, "document") if is_document else _Piece(text, control=piece.control))
    return result, count
