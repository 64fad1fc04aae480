"""The index on a Redis server, shared by several engines."""

import re
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.metrics import IndexStats
from daric_rag.engine.scheduling.index import redis_scripts
from daric_rag.engine.scheduling.index.base import IndexEntry, KVIndex, Tier
from daric_rag.engine.scheduling.index.memory import MemoryIndex
from daric_rag.engine.scheduling.index.redis_link import Argument, RedisDownError
from daric_rag.engine.scheduling.index.redis_writer import KEYS_PER_CALL, RedisWriter, Update
from daric_rag.errors import CacheUnavailableError

_BITS = {Tier.HOST: 1, Tier.DISK: 2}
_ALL = 3
_DIGITS = bytes(byte - 48 if byte in b"0123" else 0 for byte in range(256))
_UNCHANGED = (_ALL, 0, 0)

Item = TypeVar("Item")


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
        self._lock = threading.Lock()
        self._lookups = self._looked_up = self._hits = self._repaired = 0
        self._writer = RedisWriter(url, self.owner, self._own.entries, self._insertion)
        self._link = self._writer.link

    def __repr__(self) -> str:
        return f"RedisIndex({self._link.shown_url!r}, owner={self.owner!r})"

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
        with self._lock:
            self._lookups += 1
            self._looked_up += len(flat)
            self._hits += sum(depths)
        return depths

    def touch(self, keys: Sequence[SegmentKey]) -> None:
        """Count one access of each key, later and in the background."""
        for batch in _batches(keys):
            names = tuple(key.hex() for key in batch)
            self._writer.put(Update(redis_scripts.TOUCH, names, {}, len(batch)))

    def insert(self, entries: Sequence[IndexEntry]) -> None:
        """Announce copies of this engine."""
        self._own.insert(entries)
        for batch in _batches(entries):
            self._writer.put(self._insertion(batch))

    def set_tier(self, keys: Sequence[SegmentKey], tier: Tier) -> None:
        """Record that copies of this engine moved."""
        self._own.set_tier(keys, tier)
        keep = _ALL if tier is Tier.HOST else _ALL & ~_BITS[Tier.HOST]
        for batch in _batches(keys):
            # A key that this engine never announced may be unknown to the server too, and stays so.
            changes = {key: (keep, _BITS[tier] if self._own.node(key) else 0) for key in batch}
            self._put(redis_scripts.SET_TIER, tier, changes)

    def remove(self, keys: Sequence[SegmentKey], tier: Tier | None = None) -> None:
        """Forget copies: this engine's host copy, the shared disk copy, or both."""
        self._own.remove(keys, tier)
        keep = 0 if tier is None else _ALL & ~_BITS[tier]
        for batch in _batches(keys):
            self._put(redis_scripts.REMOVE, tier or "all", dict.fromkeys(batch, (keep, 0)))

    def repair_missing(self, keys: Sequence[SegmentKey]) -> None:
        """Forget copies whose payload turned out to be gone; copies in other engines' memory stay."""
        with self._lock:
            self._repaired += len(keys)
        self.remove(keys)

    def entries(self, root: SegmentKey | None = None) -> Iterator[IndexEntry]:
        """Every copy of every engine, one entry per segment and tier.

        Raises:
            CacheUnavailableError: the server is lost.
        """
        self.flush()
        for known in [root] if root is not None else set(self._scan("roots")):
            for batch in _batches(list(set(self._scan(f"r:{known.hex()}")))):
                yield from self._described(batch)

    def clear(self, root: SegmentKey | None = None) -> int:
        """Forget every copy of every engine under one root or all; returns the number of segments."""
        self.flush()
        removed = 0
        for known in [root] if root is not None else set(self._scan("roots")):
            more = 1
            while more:
                count, more = self._tool_call(redis_scripts.CLEAR, known.hex(), length=2)
                removed += int(count)
        self._own.clear(root)
        return removed

    def stats(self) -> IndexStats:
        """Counters of this engine, and the number of segments of all engines (0 while the server is lost)."""
        try:
            count = self._link.call(redis_scripts.COUNT)
        except RedisDownError:
            count = 0
        own = self._own.stats()
        with self._lock:
            return IndexStats(
                segments=count if isinstance(count, int) else 0,
                lookups=self._lookups,
                looked_up_segments=self._looked_up,
                hit_segments=self._hits,
                inserted=own.inserted,
                removed=own.removed,
                repaired=self._repaired,
                available=self._link.up,
                failures=self._link.failures,
                dropped=self._writer.dropped,
                tiers=own.tiers,
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

    def _insertion(self, entries: Sequence[IndexEntry]) -> Update:
        arguments: list[Argument] = [self.owner, self._disk]
        changes: dict[SegmentKey, tuple[int, int]] = {}
        for entry in entries:
            arguments += (entry.key.hex(), entry.parent.hex(), entry.num_tokens, entry.tier, entry.root.hex())
            changes[entry.key] = (_ALL, changes.get(entry.key, _UNCHANGED)[1] | _BITS[entry.tier])
        return Update(redis_scripts.INSERT, tuple(arguments), changes, len(entries))

    def _put(self, script: str, tier: str, changes: dict[SegmentKey, tuple[int, int]]) -> None:
        arguments = (self.owner, self._disk, tier, *[key.hex() for key in changes])
        self._writer.put(Update(script, arguments, changes, len(changes)))

    def _scan(self, name: str) -> Iterator[SegmentKey]:
        """The members of a set of keys on the server; one may come twice."""
        cursor = "0"
        while True:
            reply = self._tool_call(redis_scripts.SCAN, name, cursor)
            yield from map(_unhex, reply[1:])
            cursor = reply[0].decode()
            if cursor == "0":
                return

    def _described(self, keys: Sequence[SegmentKey]) -> Iterator[IndexEntry]:
        names = [key.hex() for key in keys]
        reply = self._tool_call(redis_scripts.DESCRIBE, *names, length=4 * len(keys))
        for position, key in enumerate(keys):
            parent, num_tokens, tiers, root = reply[4 * position : 4 * position + 4]
            for letter, tier in ((b"h", Tier.HOST), (b"d", Tier.DISK)):
                if letter in tiers:
                    yield IndexEntry(key, _unhex(parent), int(num_tokens), tier, _unhex(root))

    def _tool_call(self, script: str, *arguments: Argument, length: int | None = None) -> list[Any]:
        try:
            reply = self._link.call_background(script, *arguments)
        except RedisDownError as error:
            raise CacheUnavailableError(f"index={self._link.shown_url!r} does not answer") from error
        if not isinstance(reply, list) or not reply or (length is not None and len(reply) != length):
            raise CacheUnavailableError(f"index={self._link.shown_url!r} answers with something unexpected")
        return reply


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), KEYS_PER_CALL):
        yield items[start : start + KEYS_PER_CALL]


def _unhex(name: bytes) -> SegmentKey:
    return bytes.fromhex(name.decode("ascii"))
