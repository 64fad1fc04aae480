"""Computing and storing the KV of many documents, a bounded number of them at once."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from daric_rag.engine.event_loop import gather
from daric_rag.engine.input_processor import InputProcessor, ProcessedPrompt
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import WarmResult
from daric_rag.progress import progress_bar
from daric_rag.prompt import Content
from daric_rag.recognition import Recognizer

T = TypeVar("T")

# Documents that are in the engine at once: enough to fill its batches, few enough to stay responsive.
_CONCURRENCY = 32
# Documents that are tokenised in one go: a prompt that arrives meanwhile waits for no more than these.
_TEXT_BATCH = 8


class Warming:
    """One call of `warm`; used in the engine's event loop.

    `in_thread`: runs what reads texts beside the loop. `warm_one`: has the KV of one chunk computed and stored.
    `recognizer`: gets the texts, None if texts are not recognised.
    """

    def __init__(
        self,
        processor: InputProcessor,
        recognizer: Recognizer | None,
        in_thread: Callable[..., Awaitable[Any]],
        warm_one: Callable[[ProcessedPrompt], Awaitable[RequestMetrics]],
    ) -> None:
        self._processor = processor
        self._recognizer = recognizer
        self._in_thread = in_thread
        self._warm_one = warm_one

    async def run(self, documents: Sequence[Content], progress: bool | None) -> WarmResult:
        """Raises ValueError for a document that is none or is too long, before anything is computed."""
        started = time.perf_counter()
        chunks, empty = await self._chunks(documents)
        with progress_bar(len(chunks), "warming", "document", progress) as bar:
            waiting = iter(chunks)

            async def work() -> list[RequestMetrics]:
                done = []
                for chunk in waiting:
                    done.append(await self._warm_one(chunk))
                    bar.update()
                return done

            workers = await gather([work() for _ in range(min(_CONCURRENCY, len(chunks)))])
        done = [metrics for each in workers for metrics in each]
        return WarmResult(
            documents=len(done),
            tokens=sum(metrics.prompt_tokens for metrics in done),
            generated_tokens=sum(metrics.generated_tokens for metrics in done),
            cached_documents=sum(metrics.generated_tokens == 0 for metrics in done),
            empty=empty,
            seconds=time.perf_counter() - started,
        )

    async def _chunks(self, documents: Sequence[Content]) -> tuple[list[ProcessedPrompt], int]:
        """The chunks of documents, each once, and how many documents are empty; the texts are registered."""
        unique: dict[tuple[int, ...], ProcessedPrompt] = {}
        empty = 0
        for batch in _batched(enumerate(documents), _TEXT_BATCH):
            chunks = await self._in_thread(self._chunks_of, batch)
            unique |= {token_ids: chunk for token_ids, chunk in chunks if token_ids}
            empty += sum(not token_ids for token_ids, _ in chunks)
        # Only now: of documents that are refused nothing is kept.
        if self._recognizer is not None:
            texts = (document for document in documents if isinstance(document, str))
            for some in _batched(texts, _TEXT_BATCH):
                await self._in_thread(self._recognizer.register, some)
        return list(unique.values()), empty

    def _chunks_of(
        self, numbered: Sequence[tuple[int, Content]]
    ) -> list[tuple[tuple[int, ...], ProcessedPrompt]]:
        chunks = [self._processor.warm_chunk(one, f"documents[{number}]") for number, one in numbered]
        return [(tuple(chunk.token_ids), chunk) for chunk in chunks]


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch
