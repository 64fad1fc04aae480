"""Making a model's profile: documents in, in groups, as prompts that the worker's `Calibration` watches."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any

from daric_rag.config import DaricConfig
from daric_rag.engine.input_processor import InputProcessor, ProcessedPrompt
from daric_rag.engine.profile import NUM_PARTS, LayerGain, Profile, being_made, publish
from daric_rag.errors import DaricError
from daric_rag.progress import progress_bar
from daric_rag.prompt import ChunkedPrompt, Content, checked_content

GROUP_TOKENS = 1800
"""Tokens of the documents that are computed in one context: as many as ten passages have."""

_PIECE_TOKENS = 512
_MIN_PIECES = 2 * NUM_PARTS
_MIN_TOKENS = 1500
_INSTRUCTION = "Answer the question with a few words, using only the given passages."
_QUESTION = "What do these passages say?"


def bundled_documents() -> list[str]:
    """The documents that a model is calibrated on if it has no others: short texts of many kinds."""
    text = (resources.files("daric_rag.engine") / "calibration_texts.txt").read_text("utf-8")
    return [document.strip() for document in text.split("\n%%\n") if document.strip()]


class CalibrationTooSlowError(DaricError):
    """Calibration would take longer than it may."""


class Calibrator:
    """Runs one calibration in the engine's event loop.

    `compute`: sends a group through vLLM as part number n. `call_ranks`: vLLM's collective RPC. `longest`: most
    tokens of a prompt that one step can compute.
    """

    def __init__(
        self,
        processor: InputProcessor,
        config: DaricConfig,
        compute: Callable[[ProcessedPrompt, int], Awaitable[object]],
        call_ranks: Callable[..., Awaitable[list[Any]]],
        longest: int,
    ) -> None:
        self._processor = processor
        self._config = config
        self._compute = compute
        self.call_ranks = call_ranks
        self._longest = longest

    def groups(self, documents: Sequence[Content]) -> list[ProcessedPrompt]:
        """Prompts over all documents, each document in one; long ones are cut.

        Raises ValueError for too few documents, naming how many are needed.
        """
        pieces = [
            piece
            for number, document in enumerate(documents)
            for piece in self._pieces(checked_content(f"documents[{number}]", document))
        ]
        num_tokens = sum(map(len, pieces))
        if len(pieces) < _MIN_PIECES or num_tokens < _MIN_TOKENS:
            raise ValueError(
                f"calibration needs at least {_MIN_PIECES} documents with {_MIN_TOKENS} tokens together; "
                f"given were {len(documents)} ({len(pieces)} pieces of at most {_PIECE_TOKENS} tokens) with "
                f"{num_tokens} tokens"
            )
        # The same documents make the same profile.
        random.Random(0).shuffle(pieces)
        room = max(_PIECE_TOKENS, min(GROUP_TOKENS, self._longest - _PIECE_TOKENS))
        count = max(NUM_PARTS, -(-num_tokens // room))
        return [self._prompt(pieces[number::count]) for number in range(count)]

    def _pieces(self, document: Content) -> list[list[int]]:
        # Not `warm_chunk`: a document may be longer than the model's window.
        token_ids = (
            self._processor.tokenize(document.strip()) if isinstance(document, str) else list(document)
        )
        return [token_ids[n : n + _PIECE_TOKENS] for n in range(0, len(token_ids), _PIECE_TOKENS)]

    def _prompt(self, pieces: Sequence[list[int]]) -> ProcessedPrompt:
        prompt = ChunkedPrompt(_INSTRUCTION, list(pieces), _QUESTION)
        return self._processor.process(prompt, self._config)

    async def run(
        self,
        documents: Sequence[Content],
        path: Path,
        *,
        model: str,
        model_key: str,
        progress: bool | None,
        limit_s: float | None = None,
    ) -> Profile:
        """Compute all groups, fit, and write the profile to `path`.

        Raises ValueError for too few documents, `CalibrationTooSlowError` if it would take longer than `limit_s`
        seconds, `CacheUnavailableError` if the profile cannot be written.
        """
        groups = await asyncio.to_thread(self.groups, documents)
        await self.call_ranks("daric_begin_calibration")
        try:
            await self._compute_all(groups, progress, limit_s)
            with being_made(path) as folder:
                fits = await self.call_ranks("daric_end_calibration", args=(str(folder),))
                return publish(
                    path,
                    folder,
                    model_key=model_key,
                    model=model,
                    documents_digest=_digest(groups),
                    num_tokens=fits[0]["num_tokens"],
                    layers=tuple(
                        _mean_gain(layers) for layers in zip(*(fit["layers"] for fit in fits), strict=True)
                    ),
                    versions={name: importlib.metadata.version(name) for name in ("daric-rag", "torch")},
                )
        except BaseException:
            # The engine may be what failed: the first error is the one to tell.
            with contextlib.suppress(Exception):
                await self.call_ranks("daric_end_calibration", args=(None,))
            raise

    async def _compute_all(
        self, groups: Sequence[ProcessedPrompt], progress: bool | None, limit_s: float | None
    ) -> None:
        started = time.perf_counter()
        with progress_bar(len(groups), "calibrating", "group", progress) as bar:
            for number, group in enumerate(groups):
                await self._compute(group, number % NUM_PARTS)
                bar.update()
                # The first one pays for what happens once in a process.
                if number == 1 and limit_s is not None:
                    needed = (time.perf_counter() - started) / 2 * len(groups)
                    if needed > limit_s:
                        raise CalibrationTooSlowError(
                            f"calibration would take about {needed:.0f} s, allowed are {limit_s:.0f} s"
                        )


def _mean_gain(ranks: Sequence[dict[str, float]]) -> LayerGain:
    return LayerGain(**{name: fmean(rank[name] for rank in ranks) for name in ranks[0]})


def _digest(groups: Sequence[ProcessedPrompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for group in groups:
        digest.update(repr((group.token_ids, group.bounds)).encode())
    return digest.hexdigest()
