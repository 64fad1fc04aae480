"""The changes of a store that its owner has not heard of yet."""

from __future__ import annotations

from typing import Literal, Protocol

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.storage.base import StoreEvent


class Named(Protocol):
    """Anything that stands for a segment."""

    key: SegmentKey
    parent: SegmentKey
    num_tokens: int


class EventLog:
    """Events in order; not thread-safe."""

    def __init__(self) -> None:
        self._events: list[StoreEvent] = []

    def add(self, kind: Literal["added", "tier_changed", "removed"], record: Named, tier: Tier) -> None:
        """Note one change."""
        self._events.append(StoreEvent(kind, record.key, record.parent, record.num_tokens, tier))

    def drain(self) -> list[StoreEvent]:
        """All since the last call."""
        events, self._events = self._events, []
        return events
