"""A LlamaIndex prompt helper that packs nodes into prompts without losing where each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.node_parser.text.token import TokenTextSplitter

from daric_rag.config import DEFAULT_DELIMITER
from daric_rag.prompt import ChunkedPrompt, Live


class DaricLLMMetadata(LLMMetadata):
    """`LLMMetadata` with what a prompt helper needs to know of a `DaricLLM`."""

    tokenizer: Callable[[str], list[int]] | None = Field(
        default=None, exclude=True, repr=False, description="The model's tokenizer, without special tokens."
    )
    block_size: int = Field(default=32, description="Tokens per KV block: chunks are padded to a multiple.")
    delimiter: str = Field(default=DEFAULT_DELIMITER, description="Separates chunks in texts.")


class PackedText(str):
    """Documents between delimiters. It remembers them, so that packing again takes the same documents."""

    documents: tuple[str, ...]

    def __new__(cls, documents: Sequence[str], delimiter: str) -> PackedText:
        packed = super().__new__(cls, wrap(documents, delimiter))
        packed.documents = tuple(documents)
        return packed


class DaricPromptHelper(PromptHelper):
    """`PromptHelper` whose `repack` keeps every node a chunk of its own.

    It wraps whole nodes with delimiters, which `DaricLLM` reads, and starts another prompt only between nodes,
    unless one node alone exceeds the window. Repacking its own output changes nothing. Tokens are counted with
    the model's tokenizer, padding to KV blocks included.

        Settings.prompt_helper = DaricPromptHelper.from_llm_metadata(llm.metadata)

    Only for a `DaricLLM`: another model would see the delimiters as text.
    """

    _delimiter: str = PrivateAttr(default=DEFAULT_DELIMITER)
    _block_size: int = PrivateAttr(default=32)

    @classmethod
    def from_llm_metadata(
        cls,
        llm_metadata: LLMMetadata,
        chunk_overlap_ratio: float = 0.1,
        chunk_size_limit: int | None = None,
        tokenizer: Callable[[str], list[Any]] | None = None,
        separator: str = " ",
    ) -> DaricPromptHelper:
        """Create from `DaricLLM.metadata`, which also gives tokenizer, block size and delimiter."""
        metadata = llm_metadata if isinstance(llm_metadata, DaricLLMMetadata) else DaricLLMMetadata()
        helper = super().from_llm_metadata(
            llm_metadata, chunk_overlap_ratio, chunk_size_limit, tokenizer or metadata.tokenizer, separator
        )
        assert isinstance(helper, cls)
        helper._delimiter = metadata.delimiter
        helper._block_size = metadata.block_size
        return helper

    @classmethod
    def class_name(cls) -> str:
        return "DaricPromptHelper"

    def repack(
        self,
        prompt: Any,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: Any = None,
        tools: Any = None,
    ) -> list[str]:
        """Texts that each fit into `prompt`, of as many whole `text_chunks` as possible, in order.

        Raises `ValueError` if the prompt alone fills the window.
        """
        splitter = self.get_text_splitter_given_prompt(prompt, padding=padding, llm=llm, tools=tools)
        budget = self._budget(splitter.chunk_size)
        packs: list[list[str]] = [[]]
        used = 0
        for document in self._fitting(_documents(text_chunks), budget, splitter):
            cost = self._padded_tokens(document)
            if packs[-1] and used + cost > budget:
                packs.append([])
                used = 0
            packs[-1].append(document)
            used += cost
        # Without any text: one empty text, as the base class, since synthesizers expect at least one.
        return [PackedText(pack, self._delimiter) if pack else "" for pack in packs]

    def _budget(self, chunk_size: int) -> int:
        """Tokens for padded documents: the text before them is padded too, by less than a block."""
        return max(1, (chunk_size - self._block_size) // self._block_size) * self._block_size

    def _fitting(self, documents: Sequence[str], budget: int, splitter: TokenTextSplitter) -> Iterator[str]:
        """The documents, those that exceed the budget on their own in parts."""
        parts = TokenTextSplitter(
            separator=self.separator,
            chunk_size=min(budget, splitter.chunk_size),
            chunk_overlap=int(self.chunk_overlap_ratio * min(budget, splitter.chunk_size)),
            tokenizer=self._token_counter.tokenizer,
        )
        for document in documents:
            if self._padded_tokens(document) <= budget:
                yield document
            else:
                yield from (part for part in parts.split_text(document) if part.strip())

    def _padded_tokens(self, text: str) -> int:
        return -(-self._token_counter.get_string_tokens(text) // self._block_size) * self._block_size


def wrap(documents: Sequence[str], delimiter: str) -> str:
    """Documents between delimiters; the last delimiter makes what follows it no document."""
    live_delimiter = ChunkedPrompt(documents=[Live("")]).to_text(delimiter).removesuffix(delimiter)
    return ChunkedPrompt(documents=documents).to_text(delimiter).removesuffix(delimiter) + live_delimiter


def _documents(text_chunks: Sequence[str]) -> list[str]:
    documents: list[str] = []
    for chunk in text_chunks:
        documents += chunk.documents if isinstance(chunk, PackedText) else [chunk.strip()]
    return [document for document in documents if document]
