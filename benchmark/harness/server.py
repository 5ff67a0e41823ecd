"""One server process on 127.0.0.1 whose end is certain."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from benchmark.harness import processes

_LOG_TAIL_LINES = 15
_STOP_GRACE_S = 10.0
_PORT_ATTEMPTS = 3
_PORT_WORDS = b"address already in use"


class ServerFailed(RuntimeError):
    """The server ended or did not become healthy. The message holds the end of its log."""


class _PortTaken(ServerFailed):
    """Somebody else bound the port between its choice and the server's start."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now.

    It lies below the range from which the kernel takes ports for outgoing connections: a server
    binds its port only after a start of seconds or minutes, and until then such a port is lost
    easily.
    """
    for port in random.sample(range(10000, 28000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerFailed("no free port between 10000 and 28000 on 127.0.0.1")


class ServerProcess:
    """Starts `PYTHON -m MODULE ARGS --host 127.0.0.1 --port P` and waits until /health says 200.

    A context manager: on exit the whole process group and every descendant is gone, also when
    the body raised; the launcher is gone as well when this process is killed with SIGKILL. `env`
    is added to the environment. Output of all processes goes to `log_path`, appended. Raises
    ServerFailed when the server ends early or is not healthy after `timeout_s`.
    """

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] = os.devnull,
        timeout_s: float = 300.0,
        python: str = sys.executable,
    ) -> None:
        self.port = 0
        self._words = [python, "-m", module, *args]
        self.log_path = Path(log_path)
        self.start_s = 0.0
        self._env = dict(env or {})
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Base URL; valid once started."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the launcher, which is also the id of its process group."""
        if self._process is None:
            raise ServerFailed("the server was not started")
        return self._process.pid

    def start(self) -> ServerProcess:
        """Start and wait for health. `start_s` is then the time it took."""
        for _ in range(_PORT_ATTEMPTS - 1):
            with contextlib.suppress(_PortTaken):
                return self._start_once()
        return self._start_once()

    def _start_once(self) -> ServerProcess:
        begun = time.monotonic()
        self.port = free_port()
        with open(self.log_path, "ab") as log:
            log_begins = log.tell()
            self._process = subprocess.Popen(
                processes.tied([*self._words, "--host", "127.0.0.1", "--port", str(self.port)]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,
            )
        try:
            self._wait_healthy(begun + self._timeout_s, log_begins)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - begun
        return self

    def kill(self) -> None:
        """End the server and every process it started. Safe to call again."""
        process, self._process = self._process, None
        if process is None:
            return
        processes.end(process, _STOP_GRACE_S)

    def log_tail(self) -> str:
        """Last lines of the log, for messages."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _log_since(self, begins: int) -> bytes:
        if not self.log_path.is_file():
            return b""
        with open(self.log_path, "rb") as log:
            log.seek(begins)
            return log.read()

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def _wait_healthy(self, deadline: float, log_begins: int) -> None:
        assert self._process is not None
        while time.monotonic() < deadline:
            status = self._process.poll()
            if _PORT_WORDS in self._log_since(log_begins):
                # The HTTP server has given up, but SGLang's other processes live on.
                raise _PortTaken(f"port {self.port} was taken meanwhile; log {self.log_path}")
            if status is not None:
                raise ServerFailed(
                    f"the server ended with status {status} while starting; "
                    f"log {self.log_path}:\n{self.log_tail()}"
                )
            if _healthy(self.url):
                return
            time.sleep(0.25)
        raise ServerFailed(
            f"the server was not healthy after {self._timeout_s:.0f} s; "
            f"log {self.log_path}:\n{self.log_tail()}"
        )


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
