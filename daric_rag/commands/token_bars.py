"""What happened to every token of a prompt, as one bar per chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from daric_rag.engine.metrics import RequestMetrics
from daric_rag.engine.token_ranges import TokenRange


@dataclass(frozen=True)
class TokenKind:
    """How the KV of a token came about; `mark` and `colour` (an ANSI code) draw it."""

    name: str
    meaning: str
    mark: str
    colour: int


LOADED = TokenKind("loaded", "its KV came from the document cache, rotated to its new position", "=", 32)
RECOMPUTED = TokenKind("recomputed", "computed again, in the context of the whole prompt", "#", 33)
GENERATED = TokenKind("generated", "computed as if nothing stood before its document, and stored", "+", 34)
LIVE = TokenKind("live", "computed once, in the context of the whole prompt, as in plain vLLM", "*", 35)
ENGINE_HIT = TokenKind("engine hit", "vLLM's own prefix cache had it", ".", 90)
KINDS = (LOADED, RECOMPUTED, GENERATED, LIVE, ENGINE_HIT)

_BLOCK = "█"
_NAME_WIDTH = 24


def token_kinds(
    metrics: RequestMetrics, bounds: Sequence[TokenRange], live: Sequence[bool]
) -> list[TokenKind]:
    """The kind of each of the `metrics.prompt_tokens` tokens; `bounds` and `live` are the prompt's chunk layout.

    A token that was loaded or generated first and recomputed then is `RECOMPUTED`.
    """
    if not metrics.reused:
        kinds = [LIVE] * metrics.prompt_tokens
    else:
        kinds = [GENERATED if metrics.loaded_tokens == 0 else LOADED] * metrics.prompt_tokens
        for start, end in metrics.recomputed_ranges:
            kinds[start:end] = [RECOMPUTED] * (end - start)
        for (start, end), is_live in zip(bounds, live, strict=True):
            if is_live:
                kinds[start:end] = [LIVE] * (end - start)
    kinds[: metrics.engine_hit_tokens] = [ENGINE_HIT] * metrics.engine_hit_tokens
    return kinds


@dataclass(frozen=True)
class TokenBars:
    """Draws prompts; `columns` of the screen, `colour`: with ANSI codes, else with one character per kind."""

    columns: int = 100
    colour: bool = False

    def rows(
        self, names: Sequence[str], bounds: Sequence[TokenRange], kinds: Sequence[TokenKind]
    ) -> list[str]:
        """One line per chunk: name, tokens, bar."""
        scale = self.tokens_per_mark(bounds)
        return [
            f"{name[:_NAME_WIDTH]:<{_NAME_WIDTH}} {end - start:>5} {self._bar(kinds[start:end], scale)}"
            for name, (start, end) in zip(names, bounds, strict=True)
        ]

    def tokens_per_mark(self, bounds: Sequence[TokenRange]) -> int:
        """Tokens that one mark stands for, so that the longest chunk fits the screen."""
        room = max(1, self.columns - _NAME_WIDTH - 8)
        return max(1, -(-max((end - start for start, end in bounds), default=1) // room))

    def legend(self) -> list[str]:
        """All kinds, with their marks and meanings."""
        return [f"{self._draw(kind, 2)} {kind.name:<10} {kind.meaning}" for kind in KINDS]

    def _bar(self, kinds: Sequence[TokenKind], scale: int) -> str:
        """A mark shows what most of its tokens are."""
        bar = ""
        marks = [_most(kinds[start : start + scale]) for start in range(0, len(kinds), scale)]
        start = 0
        for position in range(1, len(marks) + 1):
            if position == len(marks) or marks[position] != marks[start]:
                bar += self._draw(marks[start], position - start)
                start = position
        return bar

    def _draw(self, kind: TokenKind, count: int) -> str:
        return f"\x1b[{kind.colour}m{_BLOCK * count}\x1b[0m" if self.colour else kind.mark * count


def _most(kinds: Sequence[TokenKind]) -> TokenKind:
    return Counter(kinds).most_common(1)[0][0]
