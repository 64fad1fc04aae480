"""An engine that answers from a script, for tests of the LangChain classes without vLLM's engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from daric_rag.config import PER_CALL_OPTIONS, DaricConfig, reject_unknown
from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.result import Completion, GenerationResult, StreamChunk

METRICS = RequestMetrics(
    prompt_tokens=100,
    padding_tokens=4,
    engine_hit_tokens=32,
    loaded_tokens=40,
    generated_tokens=0,
    recomputed_tokens=50,
    live_tokens=28,
    ttft_s=0.1,
    completion_tokens=3,
)


class Tokenizer:
    """Tokens are characters."""

    def __init__(self, chat_template: str = "{{ messages }}") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}


class ScriptedEngine:
    """Answers every prompt with `answer`, and remembers what it was asked; streams character by character."""

    def __init__(self, answer: str = "yes", chat_template: str = "{{ messages }}") -> None:
        self.answer = answer
        self.model_name = "scripted"
        self.config = DaricConfig(n_avg=16)
        self.recognizer = None
        self.tokenizer = Tokenizer(chat_template)
        self.processor = self
        self.has_chat_template = True
        self.prompts: list[Any] = []
        self.params: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self.calls = 0
        self.aborted = threading.Event()
        self.hang = False

    def register(self, texts: Sequence[str]) -> None:
        pass

    def generate(self, prompts: Any, params: Any, **options: Any) -> Any:
        many = prompts if isinstance(prompts, list) else [prompts]
        self._note(many, params, options)
        results = [self._result(params.n) for _ in many]
        return results if isinstance(prompts, list) else results[0]

    async def agenerate(self, prompts: Any, params: Any, **options: Any) -> Any:
        await self._wait()
        return self.generate(prompts, params, **options)

    def stream(self, prompt: Any, params: Any, **options: Any) -> Iterator[StreamChunk]:
        self._note([prompt], params, options)
        try:
            yield from self._chunks()
        except GeneratorExit:
            self.aborted.set()
            raise

    async def astream(self, prompt: Any, params: Any, **options: Any) -> AsyncIterator[StreamChunk]:
        self._note([prompt], params, options)
        try:
            for chunk in self._chunks():
                await self._wait()
                yield chunk
        except GeneratorExit:
            self.aborted.set()
            raise

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(60 if self.hang else 0)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    def _note(self, prompts: Sequence[Any], params: Any, options: dict[str, Any]) -> None:
        reject_unknown(options, PER_CALL_OPTIONS, "a call")
        self.calls += 1
        self.prompts += prompts
        self.params.append(params)
        self.options.append(options)

    def _result(self, n: int) -> GenerationResult:
        ids = (1, 2, 3)
        completions = tuple(Completion(index, self.answer, ids, "stop") for index in range(n))
        return GenerationResult("r", completions, METRICS)

    def _chunks(self) -> Iterator[StreamChunk]:
        for number, character in enumerate(self.answer):
            is_last = number == len(self.answer) - 1
            yield StreamChunk(
                "r",
                0,
                character,
                (number,),
                "stop" if is_last else None,
                metrics=METRICS if is_last else None,
            )
