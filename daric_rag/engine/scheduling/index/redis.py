"""The index on a Redis server, shared by several engines."""

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import groupby

from daric_rag.engine.keys import SegmentKey, Tier
from daric_rag.engine.metrics import IndexStats
from daric_rag.engine.scheduling.index import redis_scripts
from daric_rag.engine.scheduling.index.base import FRESH_S, KVIndex
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.index.redis_link import RedisDownError
from daric_rag.engine.scheduling.index.redis_writer import KEYS_PER_CALL, RedisWriter, Update

_BITS = {Tier.HOST: 1, Tier.DISK: 2}
_ALL = 3
_DIGITS = bytes(byte - 48 if byte in b"0123" else 0 for byte in range(256))
_UNCHANGED = (_ALL, 0, 0)


class RedisIndex(KVIndex):
    """Index of several engines on one Redis server (not a cluster), reached by `redis://` or `rediss://`.

    A copy in host memory counts only for the engine that holds it, one on disk for every engine with the
    same `shared_disk_id` (see `shared_disk_id()`; without one the disk is this engine's own). Updates are
    queued and sent by a thread, and seen at once by this engine's own look-ups. If the server is lost,
    look-ups return zeros: the first waits up to 0.2 s, the rest not at all, while the thread reconnects
    with back-off and then announces this engine's copies anew. Engines that are gone for 30 s lose their
    host copies.

    Raises:
        CacheUnavailableError: the server cannot be used; the message shows the URL without its password.
        MissingExtraError: on import, if the `redis` client is not installed.
        ValueError: `url` or `shared_disk_id` is malformed.
    """

    def __init__(self, url: str, *, shared_disk_id: str | None = None) -> None:
        if shared_disk_id is not None and not re.fullmatch(r"[0-9A-Za-z_.-]{1,128}", shared_disk_id):
            raise ValueError(
                f"shared_disk_id is {shared_disk_id!r}; allowed are 1 to 128 of 0-9 A-Z a-z _ . -"
            )
        self.owner = uuid.uuid4().hex
        self._disk = shared_disk_id or self.owner
        self._own = MemoryIndex()
        self._changes = 0
        self._writer = RedisWriter(url, self.owner, self._announcements)
        self._link = self._writer.link

    def __repr__(self) -> str:
        return f"RedisIndex({self._link.shown_url!r}, owner={self.owner!r})"

    @property
    def version(self) -> int:
        """Changes with every update of this engine, and every `FRESH_S` seconds for those of others."""
        return self._changes + int(time.monotonic() / FRESH_S)

    def lookup(self, chains: Sequence[Sequence[SegmentKey]]) -> list[int]:
        """For every chunk's chain of keys, return how many leading segments this engine can load."""
        flat = [key for chain in chains for key in chain]
        copies = self._copies(flat)
        depths = []
        position = 0
        for chain in chains:
            missing = copies.find(b"\0", position, position + len(chain))
            depths.append(len(chain) if missing < 0 else missing - position)
            position += len(chain)
        return depths

    def insert(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Announce copies of this engine."""
        self._own.insert(keys, tier)
        for update in self._insertions(keys, tier):
            self._writer.put(update)
        self._changes += 1

    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget copies: this engine's host copy, the shared disk copy, or both."""
        self._own.remove(keys, tier)
        kept = 0 if tier is None else _ALL & ~_BITS[tier]
        for batch in _batches(keys):
            self._writer.put(self._update(redis_scripts.REMOVE, tier or "all", batch, (kept, 0)))
        self._changes += 1

    def stats(self) -> IndexStats:
        """The number of segments of all engines (0 while the server is lost), and how the server fares."""
        try:
            count = self._link.call(redis_scripts.COUNT)
        except RedisDownError:
            count = 0
        return IndexStats(
            segments=count if isinstance(count, int) else 0,
            available=self._link.up,
            failures=self._link.failures,
            dropped=self._writer.dropped,
        )

    def flush(self) -> None:
        """Wait until the updates made before are on the server, or the server is lost."""
        self._writer.flush()

    def close(self) -> None:
        """Send what waits, withdraw this engine's host copies, disconnect."""
        self._writer.close()
        self._own.close()

    def _copies(self, keys: Sequence[SegmentKey]) -> bytes:
        """One byte per key: which copies this engine can load, its own queued updates included."""
        if not keys:
            return b""
        # Taken first: an update that arrives at the server meanwhile is then seen either here or there.
        pending = self._writer.pending(keys)
        try:
            reply = self._link.call(
                redis_scripts.LOOKUP, self.owner, self._disk, *[key.hex() for key in keys]
            )
        except RedisDownError:
            return bytes(len(keys))
        if not isinstance(reply, bytes) or len(reply) != len(keys):
            return bytes(len(keys))
        copies = reply.translate(_DIGITS)
        if not pending:
            return copies
        changes = [pending.get(key, _UNCHANGED) for key in keys]
        return bytes((bits & keep) | add for bits, (keep, add, _) in zip(copies, changes, strict=True))

    def _announcements(self) -> Iterator[Update]:
        """All copies of this engine anew."""
        for tier, copies in groupby(sorted(self._own.copies(), key=_tier_of), key=_tier_of):
            yield from self._insertions([key for key, _ in copies], tier)

    def _insertions(self, keys: Sequence[SegmentKey], tier: Tier) -> Iterator[Update]:
        for batch in _batches(keys):
            yield self._update(redis_scripts.INSERT, tier, batch, (_ALL, _BITS[tier]))

    def _update(self, script: str, tier: str, keys: Sequence[SegmentKey], change: tuple[int, int]) -> Update:
        arguments = (self.owner, self._disk, tier, *[key.hex() for key in keys])
        return Update(script, arguments, dict.fromkeys(keys, change))


def _tier_of(copy: tuple[SegmentKey, Tier]) -> Tier:
    return copy[1]


def _batches(keys: Sequence[SegmentKey]) -> Iterator[Sequence[SegmentKey]]:
    for start in range(0, len(keys), KEYS_PER_CALL):
        yield keys[start : start + KEYS_PER_CALL]
