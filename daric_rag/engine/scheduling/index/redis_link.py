"""One Redis server behind a circuit breaker: a slow or dead server is waited for once, not at every call."""

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from daric_rag.engine.scheduling.index import redis_scripts
from daric_rag.errors import CacheUnavailableError, DaricError, MissingExtraError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.connection import parse_url
    from redis.retry import Retry
except ImportError as error:
    raise MissingExtraError(
        'index="redis://…" needs the Redis client: pip install "daric-rag[redis]"'
    ) from error

logger = logging.getLogger(__name__)

Argument = str | int
Call = tuple[str, Sequence[Argument]]
"""A script of `redis_scripts` and its arguments."""
Reply = TypeVar("Reply")

LOOKUP_TIMEOUT_S = 0.2
"""How long the path of a request waits for the server, once per outage."""
BACKGROUND_TIMEOUT_S = 1.0
_WARNING_INTERVAL_S = 60.0
_URL = re.compile(
    r"(?P<scheme>rediss?)://(?:(?P<credentials>[^/@?]*)@)?"
    r"(?P<location>(?:\[[0-9A-Fa-f:.]+\]|[^:/@?\[\]]+)(?::\d{1,5})?(?:/\d*)?)(?:\?.*)?"
)
_TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
# A server that is no Redis makes the parser fail with a ValueError.
_FAILURES = (redis.RedisError, OSError, ValueError)


class RedisDownError(DaricError):
    """The server cannot be reached at the moment, or does not do what it is asked to."""


def redact(url: str) -> str:
    """Return the URL without its password and query; all of it is hidden if it is malformed."""
    match = _URL.fullmatch(url)
    if match is None:
        return f"{url.partition('://')[0]}://***" if url.startswith(("redis://", "rediss://")) else "***"
    credentials = match["credentials"]
    # `redis://word@host` names a user, but whoever writes it means a password.
    shown = (
        "" if credentials is None else f"{credentials.partition(':')[0] if ':' in credentials else ''}:***@"
    )
    return f"{match['scheme']}://{shown}{match['location']}"


class RedisLink:
    """Runs scripts on one server; `on_down` is called from the thread that noticed a failure."""

    def __init__(self, url: str, on_down: Callable[[], None]) -> None:
        self.shown_url = redact(url)
        self._on_down = on_down
        self._lock = threading.Lock()
        self._hashes = {
            text: hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
            for name, text in vars(redis_scripts).items()
            if name.isupper() and not name.startswith("_")
        }
        self._foreground = self._client(url, LOOKUP_TIMEOUT_S)
        self._background = self._client(url, BACKGROUND_TIMEOUT_S)
        self._warned_at = float("-inf")
        self.failures = 0
        self.up = True
        try:
            self._probe()
        except _FAILURES as error:
            self.close()
            raise CacheUnavailableError(f"index={self.shown_url!r} cannot be used: {error}") from error

    def call(self, script: str, *arguments: Argument) -> object:
        """Run one script on the path of a request, in one round trip; raises `RedisDownError`."""
        return self._guarded(lambda: self._run(self._foreground, script, arguments))

    def call_background(self, script: str, *arguments: Argument) -> object:
        """The same with a longer time limit, for tools and the writer's thread."""
        return self._guarded(lambda: self._run(self._background, script, arguments))

    def send(self, calls: Sequence[Call]) -> list[bool]:
        """Run many scripts in one round trip; False marks one that the server refused (out of memory?)."""
        replies = self._guarded(lambda: self._run_all(calls))
        for reply in replies:
            if isinstance(reply, Exception):
                self._warn("refused an update of the KV index: %s", reply)
        return [not isinstance(reply, Exception) for reply in replies]

    def reconnect(self) -> bool:
        """Try the server again, whatever it did before; true if look-ups work."""
        try:
            for client in (self._foreground, self._background):
                client.connection_pool.disconnect()
            self._probe()
        except _FAILURES:
            with self._lock:
                self.failures += 1
            return False
        self.up = True
        logger.info("Redis at %s answers again; KV is reused again", self.shown_url)
        return True

    def close(self) -> None:
        """Close all connections."""
        self.up = False
        for client in (self._foreground, self._background):
            client.connection_pool.disconnect()

    def _client(self, url: str, timeout_s: float) -> "redis.Redis":
        options = self._options(url)
        limits = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s, "protocol": 2}
        options |= limits | {"retry": Retry(NoBackoff(), 0), "decode_responses": False}
        return redis.Redis(connection_pool=redis.ConnectionPool(**options))

    def _options(self, url: str) -> dict[str, Any]:
        try:
            if _URL.fullmatch(url) is None:
                raise ValueError
            options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        except ValueError:
            # The parser's own message may quote a piece of the password.
            raise ValueError(
                f"index={self.shown_url!r} is malformed; allowed is redis[s]://[[user]:password@]host[:port][/db]"
            ) from None
        tls = _TLS_OPTIONS if url.startswith("rediss://") else ()
        allowed = ("db", "username", "password", *tls)
        unknown = sorted(set(options) - {*allowed, "host", "port", "connection_class"})
        if unknown:
            raise ValueError(
                f"index={self.shown_url!r} has the option {unknown[0]!r}; allowed are {', '.join(allowed)}"
            )
        return options

    def _probe(self) -> None:
        """Do on both connections what a look-up does, so that none has to connect later."""
        for client in (self._background, self._foreground):
            self._run(client, redis_scripts.LOOKUP, ("probe", "probe", "probe"))

    def _guarded(self, action: Callable[[], Reply]) -> Reply:
        if not self.up:
            raise RedisDownError(self.shown_url)
        try:
            return action()
        except _FAILURES as error:
            self._fail(error)
            raise RedisDownError(self.shown_url) from error

    def _run(self, client: "redis.Redis", script: str, arguments: Sequence[Argument]) -> object:
        execute: Callable[..., object] = client.execute_command
        try:
            return execute("EVALSHA", self._hashes[script], 0, *arguments)
        except redis.exceptions.NoScriptError:
            return execute("EVAL", script, 0, *arguments)

    def _run_all(self, calls: Sequence[Call]) -> list[object]:
        replies = self._pipeline(calls)
        if any(isinstance(reply, redis.exceptions.NoScriptError) for reply in replies):
            for script in {script for script, _ in calls}:
                self._background.script_load(script)
            replies = self._pipeline(calls)
        return replies

    def _pipeline(self, calls: Sequence[Call]) -> list[object]:
        with self._background.pipeline(transaction=False) as pipeline:
            execute: Callable[..., object] = pipeline.execute_command
            for script, arguments in calls:
                execute("EVALSHA", self._hashes[script], 0, *arguments)
            return list(pipeline.execute(raise_on_error=False))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self.failures += 1
            was_up, self.up = self.up, False
        if was_up:
            self._warn("cannot be used, requests are served without reuse until it answers: %s", error)
            self._on_down()

    def _warn(self, message: str, error: Exception) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._warned_at < _WARNING_INTERVAL_S:
                return
            self._warned_at = now
        logger.warning("Redis at %s " + message, self.shown_url, error)
