"""Updates of the Redis index, sent by a thread of their own so that no request waits for them."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from daric_rag.engine.keys import SegmentKey
from daric_rag.engine.scheduling.index import redis_scripts
from daric_rag.engine.scheduling.index.redis_link import Argument, Call, RedisDownError, RedisLink

MAX_QUEUED_KEYS = 65_536
KEYS_PER_CALL = 256
_KEYS_PER_ROUND_TRIP = 1024
_BEAT_S = 5.0
OWNER_TIMEOUT_S = 30.0
"""An engine that was silent for so long counts as gone, and its host copies as lost."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 2.0


@dataclass(slots=True)
class Update:
    """One script call in waiting: what it does to which copies of the keys, as (bits kept, bits added)."""

    script: str
    arguments: tuple[Argument, ...]
    changes: dict[SegmentKey, tuple[int, int]]
    sequence: int = field(default=0)

    @property
    def num_keys(self) -> int:
        """Keys that it changes."""
        return len(self.changes)


class PendingChanges:
    """What waiting updates will do to the copies of each key: an engine always sees its own updates."""

    def __init__(self) -> None:
        self._changes: dict[SegmentKey, tuple[int, int, int]] = {}

    def add(self, update: Update) -> None:
        for key, (keep, add) in update.changes.items():
            kept_before, added_before, _ = self._changes.get(key, (3, 0, 0))
            self._changes[key] = (kept_before & keep, (added_before & keep) | add, update.sequence)

    def done(self, update: Update) -> None:
        for key in update.changes:
            change = self._changes.get(key)
            if change is not None and change[2] == update.sequence:
                del self._changes[key]

    def of(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, tuple[int, int, int]]:
        changes = self._changes
        return {key: changes[key] for key in keys if key in changes} if changes else {}


class RedisWriter:
    """A bounded queue of updates and the thread that empties it, keeps the owner alive and reconnects."""

    def __init__(self, url: str, owner: str, announcements: Callable[[], Iterator[Update]]) -> None:
        self._owner = owner
        self._announcements = announcements
        self._changed = threading.Condition()
        self._queue: deque[Update] = deque()
        self._queued_keys = 0
        self._sequence = 0
        self._pending = PendingChanges()
        self._resync = False
        self._announcing = False
        self._closing = False
        self._next_beat = 0.0
        self._retry_s = _FIRST_RETRY_S
        self.dropped = 0
        self.link = RedisLink(url, on_down=self._wake)
        self._thread = threading.Thread(target=self._run, name="daric-redis-index", daemon=True)
        self._thread.start()

    def put(self, update: Update) -> None:
        """Queue an update; never waits. One that does not fit is given up and made good by a later resync."""
        with self._changed:
            if self._closing:
                return
            if self._queued_keys + update.num_keys > MAX_QUEUED_KEYS:
                self.dropped += update.num_keys
                self._resync = True
                return
            self._sequence += 1
            update.sequence = self._sequence
            self._queue.append(update)
            self._queued_keys += update.num_keys
            self._pending.add(update)
            self._changed.notify_all()

    def pending(self, keys: Sequence[SegmentKey]) -> dict[SegmentKey, tuple[int, int, int]]:
        """For keys with waiting updates: (bits kept, bits added, sequence number)."""
        with self._changed:
            return self._pending.of(keys)

    def flush(self) -> None:
        """Wait until everything queued so far was sent, or the server is down."""
        with self._changed:
            last = self._sequence
            while self.link.up and not self._closing and self._behind(last):
                self._changed.wait(0.1)

    def close(self) -> None:
        """Send what waits, take leave of the server, end the thread; a dead server delays this by seconds."""
        self.flush()
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)
        try:
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline and self.link.call_background(redis_scripts.LEAVE, self._owner):
                pass
        except RedisDownError:
            pass
        self.link.close()

    def _behind(self, sequence: int) -> bool:
        waiting = bool(self._queue) and self._queue[0].sequence <= sequence
        return waiting or self._resync or self._announcing

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._closing:
            try:
                if self.link.up:
                    self._work()
                else:
                    self._try_again()
            except RedisDownError:
                continue

    def _try_again(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=self._retry_s)
        if self._closing:
            return
        if self.link.reconnect():
            self._retry_s = _FIRST_RETRY_S
            self._next_beat = 0.0
            self._resync = True
        else:
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _work(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beat()
        if self._resync:
            self._announce_all()
        self._send_some()
        with self._changed:
            idle = self._next_beat - time.monotonic()
            if idle > 0 and not self._queue and not self._resync and self.link.up and not self._closing:
                self._changed.wait(idle)

    def _beat(self) -> None:
        reply = self.link.call_background(redis_scripts.BEAT, self._owner, int(1000 * OWNER_TIMEOUT_S))
        known, more = reply if isinstance(reply, list) and len(reply) == 2 else (1, 0)
        if known != 1:
            # New here, or the server lost its data, or others took this engine for gone.
            self._resync = True
        self._next_beat = time.monotonic() + (0.0 if more == 1 else _BEAT_S)

    def _announce_all(self) -> None:
        """Announce all copies of this engine again, to a server that may have lost them."""
        # In this order, so that `flush` never sees both unset before the work is done.
        self._announcing = True
        self._resync = False
        try:
            for update in self._announcements():
                self._send([update])
        except RedisDownError:
            self._resync = True
            raise
        finally:
            self._announcing = False
            self._wake()

    def _send_some(self) -> None:
        with self._changed:
            updates = self._first_updates()
        if not updates:
            return
        self._send(updates)
        with self._changed:
            for update in updates:
                self._queue.popleft()
                self._queued_keys -= update.num_keys
                self._pending.done(update)
            self._changed.notify_all()

    def _first_updates(self) -> list[Update]:
        updates: list[Update] = []
        num_keys = 0
        for update in self._queue:
            num_keys += update.num_keys
            if updates and num_keys > _KEYS_PER_ROUND_TRIP:
                break
            updates.append(update)
        return updates

    def _send(self, updates: Sequence[Update]) -> None:
        calls: list[Call] = [(update.script, update.arguments) for update in updates]
        for update, accepted in zip(updates, self.link.send(calls), strict=True):
            if not accepted:
                self.dropped += update.num_keys
