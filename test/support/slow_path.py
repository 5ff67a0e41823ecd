"""A TCP path that takes its time: what is sent through it arrives later, in order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque

from benchmark.harness.server import free_port


class SlowPath:
    """From `address` to a port of this machine; `seconds` each way. Lives as long as the process
    that made it."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port, self._seconds = port, seconds
        own = free_port()
        self.address = f"127.0.0.1:{own}"
        self._server = socket.create_server(("127.0.0.1", own))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._server.accept()
            far = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((near, far), (far, near)):
                _Way(source, target, self._seconds)


class _Way:
    def __init__(self, source: socket.socket, target: socket.socket, seconds: float) -> None:
        self._parts: deque[tuple[float, bytes]] = deque()
        self._come = threading.Semaphore(0)
        threading.Thread(target=self._take, args=(source, seconds), daemon=True).start()
        threading.Thread(target=self._give, args=(target,), daemon=True).start()

    def _take(self, source: socket.socket, seconds: float) -> None:
        part = b"-"
        while part:
            try:
                part = source.recv(1 << 16)
            except OSError:
                part = b""
            self._parts.append((time.monotonic() + seconds, part))
            self._come.release()

    def _give(self, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while self._come.acquire():
                due, part = self._parts.popleft()
                time.sleep(max(0.0, due - time.monotonic()))
                if not part:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(part)
