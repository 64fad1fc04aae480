"""A real Redis server for tests: a child process on a free port of 127.0.0.1 that keeps nothing on disk."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

_START_TIMEOUT_S = 20.0


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """Starts `redis-server`, waits until it answers, and ends that process only.

    `options` are further command-line options. Raises `RuntimeError` with its log if it fails.
    """

    def __init__(self, password: str | None = None, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.password = password
        self._options = list(options)
        self._directory = tempfile.TemporaryDirectory(prefix="daric-redis-")
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """The server's URL, password included."""
        credentials = f":{self.password}@" if self.password else ""
        return f"redis://{credentials}127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server, empty, on the same port as before."""
        log = os.path.join(self._directory.name, "log")
        command = [
            "redis-server",
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            self._directory.name,
        ]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", "--logfile", log, *self._options]
        if self.password:
            command += ["--requirepass", self.password]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                with open(log, errors="replace") as stream:
                    raise RuntimeError(f"redis-server did not start: {stream.read()[-2000:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End the server at once, as `kill -9` does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop the server in its tracks: connections stay open, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the server and remove its directory."""
        self.kill()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        """True once the server replies, also if the reply is that a password is needed."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16)[:1] in (b"+", b"-")
        except OSError:
            return False
