"""A started I/O process: its socket, its life and its end, without any decision about them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import zmq

import sglang_hc
from sglang_hc.store.process import messages as wire

_READABLE = int(zmq.POLLIN)  # as the flag that it is, each test would cost as much as a look


class IoLink:
    """A running I/O process. Starting it takes some ms; no method waits. Used by one thread at a
    time."""

    def __init__(self, setup: wire.Setup, descriptor: int) -> None:
        """Start it. Raises OSError."""
        self._folder = tempfile.mkdtemp(prefix="sglang-hc-")  # mode 0700: the socket is private
        endpoint = f"ipc://{self._folder}/io"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # what may be under way is bounded by slots and queues
        try:
            self._socket.bind(endpoint)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sglang_hc.store.process.worker", endpoint,
                 str(descriptor), str(os.getpid())],
                stdin=subprocess.PIPE, pass_fds=[descriptor], env=_environment(),
            )  # fmt: skip
        except BaseException:
            self.close()
            raise
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(wire.encode(setup))  # if it ended already, `exit_code` says so

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it may be alive and touch the memory."""
        return self._process.poll()

    @property
    def progress(self) -> int:
        """Bytes that it has read and written; 0 where the system does not say."""
        try:
            lines = Path(f"/proc/{self.pid}/io").read_text().splitlines()
        except OSError:
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))

    def connected(self) -> None:
        """It has been heard: the socket's name is not needed any more."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, requests: list[wire.Request]) -> None:
        """Send requests as one message. Call this only after the process was heard, because it is
        not connected before. What is sent to a process that just ended is lost with it."""
        with suppress(zmq.Again):
            self._socket.send(wire.encode(requests), zmq.NOBLOCK)

    def receive(self) -> wire.Reply | None:
        """The next message, if there is one. Raises msgspec.DecodeError for nonsense."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        if not events & _READABLE:
            return None
        reply: wire.Reply = wire.decode_reply(self._socket.recv(zmq.NOBLOCK))
        return reply

    def kill(self) -> None:
        """Begin to end it. It may go on until `exit_code` says otherwise."""
        self._process.kill()

    def close(self) -> None:
        """Give back what belongs to a process that has ended, or that is left behind."""
        self._socket.close()
        self._context.term()
        self.connected()


def _environment() -> dict[str, str]:
    """This very package, and no thread pools of numerical libraries."""
    root = str(Path(sglang_hc.__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    path = root if not others else os.pathsep.join([root, others])
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
