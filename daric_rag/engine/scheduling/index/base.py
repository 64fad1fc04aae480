"""The KV cache index: which segments are stored, and where."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.metrics import IndexStats

FRESH_S = 0.05
"""How long an answer counts as current where other engines may change it unseen.

What another engine stores is then found after a step or two, and a request that waits costs at most twenty
look-ups a second instead of one a step.
"""

Probe = Callable[[SegmentKey], bool]
"""Asks a shared disk directory whether it has a record."""


class KVIndex(ABC):
    """Maps segment keys to where their KV is; safe to call from several threads.

    Keys are chained hashes, so a key stands for a whole path from its root, and a look-up that walks a
    chunk's keys from the front walks a radix tree. The index never holds KV: an entry whose payload is gone
    is a miss, and removed.
    """

    @property
    @abstractmethod
    def version(self) -> int:
        """Differs from an earlier value whenever an answer of `lookup` may differ; below a microsecond.

        Own updates change it at once. Where other engines may change answers (a shared directory, Redis), it
        changes every `FRESH_S` seconds too.
        """

    @abstractmethod
    def lookup(self, chains: Sequence[Sequence[SegmentKey]]) -> list[int]:
        """For every chunk's chain of keys, return how many leading segments this engine can load.

        The whole prompt is one call, at most one round trip.
        """

    @abstractmethod
    def insert(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Announce copies in one tier; one that is known already changes nothing."""

    @abstractmethod
    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget this engine's copies of the keys, in one tier or in all; unknown keys are ignored.

        Segments behind a removed one stay stored, but are found again only once the chain before them is
        whole.
        """

    @abstractmethod
    def stats(self) -> IndexStats:
        """Counters so far; cheap."""

    @abstractmethod
    def flush(self) -> None:
        """Return once every update made before is visible to all users of the index."""

    @abstractmethod
    def close(self) -> None:
        """Release what the index holds; calling it twice is allowed."""
