"""The I/O process: scatters snapshots, writes and reads blocks, apart from the scheduler's GIL.

    python -m sglang_hc.store.process.worker ENDPOINT MEMORY PARENT

ENDPOINT: of the ZMQ pair, bound by the parent. MEMORY: inherited descriptor of the memory file.
PARENT: its process id. Started by `io_link`, never by hand. It ends by itself when the parent is
gone: what it was writing then is as after any crash, complete and verifiable or not there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque

import zmq

from sglang_hc.store.block_io import BlockDone, Read, Write
from sglang_hc.store.disk import DirectoryError, DiskStore
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.executor import ThreadExecutor
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import messages as wire

logger = logging.getLogger(__name__)

_BURST = 4
"""Messages taken before answers are sent again."""
_LINGER_MS = 5000
_STDIN = 0


class Worker:
    """Executor and disk of this process behind messages. Belongs to the main thread."""

    def __init__(self, setup: wire.Setup, descriptor: int, socket: zmq.Socket[bytes]) -> None:
        """Raises DirectoryError."""
        self._socket = socket
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is something to answer."""
        self._outbox: deque[bytes] = deque()
        self._removed: deque[bytes] = deque()
        """Identities that the parent must forget, and has not been told yet."""
        self._dropped: list[BlockDone] = []
        """Writes that every directory in use had too many of."""
        self._cleared = threading.Event()
        self._growth: Counter[str] = Counter()
        """What was counted and not yet said."""
        self._sent = 0.0
        memory = HostMemory(setup.memory, descriptor)
        self._executor = ThreadExecutor(memory.pool, memory.buffers, self._notify)
        self._store: DiskStore | None = None
        capacity = 0
        if setup.disk is not None:
            self._store = setup.disk.open(setup.memory.layout)
            self._disk = DiskThreads(self._store, memory.pool, self._growth, self._notify)
            capacity = self._disk.capacity
        if self._store is not None:
            self._name_all(self._store.block_ids())
        self._outbox.append(wire.encode(wire.Ready(capacity)))

    def take(self, request: wire.Request) -> bool:
        """Begin what is asked for. False: it was the last request, and everything is done."""
        if isinstance(request, wire.Execute):
            self._executor.submit(request.ticket, request.operation)
        elif isinstance(request, Write):
            if not self._disk.submit_write(request):
                self._dropped.append(BlockDone(request.ticket, Outcome.DROPPED, "disk"))
                self._notify()
        elif isinstance(request, Read):
            self._disk.submit_read(request)
        elif isinstance(request, wire.Touch):
            self._disk.touch(request.block_ids)
        elif isinstance(request, wire.Expect):
            self._disk.expect(request.uses)
        elif isinstance(request, wire.Clear):
            threading.Thread(target=self._clear, name="hc-clear", daemon=True).start()
        else:
            self._executor.close()
            if self._store is not None:
                self._disk.close()
            return False
        return True

    def report(self) -> None:
        """Send answers and the heartbeat. What the parent does not take now is sent later."""
        answers = self._answers()
        said = answers.scattered, answers.blocks, answers.removed, answers.cleared, answers.counts
        quiet = not any(said)
        beat = not self._outbox and time.monotonic() >= self._sent + wire.HEARTBEAT_S
        if beat or not quiet:
            self._outbox.append(wire.encode(answers))
        try:
            while self._outbox:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
                self._outbox.popleft()
                self._sent = time.monotonic()
        except zmq.Again:
            return  # tried again with the next beat

    def _answers(self) -> wire.Answers:
        scattered = self._executor.poll()
        cleared = self._cleared.is_set()
        if cleared:
            self._cleared.clear()
        if self._store is None:
            return wire.Answers(scattered, [], [], cleared, 0, {})
        blocks, self._dropped = self._disk.poll() + self._dropped, []
        removed = self._take_removed(self._store)
        counts = dict(self._growth)
        self._growth.clear()
        directories = len(self._store.in_use())
        return wire.Answers(scattered, blocks, removed, cleared, directories, counts)

    def _take_removed(self, store: DiskStore) -> list[bytes]:
        """The next identities that cannot be read any more; names those that can be read again.

        Called after the answers were taken: a block that was written again meanwhile stays.
        """
        back, lost = store.take_directory_changes()
        self._name_all(back)
        self._removed.extend(lost)
        self._removed.extend(store.drain_removed())
        count = min(len(self._removed), wire.IDS_PER_MESSAGE)
        names = [self._removed.popleft() for _ in range(count)]
        if self._removed:
            self._notify()  # the rest goes with the next report, at once
        return [name for name in names if not store.contains([name])]

    def _name_all(self, block_ids: list[bytes]) -> None:
        for start in range(0, len(block_ids), wire.IDS_PER_MESSAGE):
            some = block_ids[start : start + wire.IDS_PER_MESSAGE]
            self._outbox.append(wire.encode(wire.Known(some)))

    def _clear(self) -> None:
        try:
            self._disk.clear()
        except Exception:
            logger.exception("clearing the disk failed; what is left is found after a restart")
        self._cleared.set()
        self._notify()

    def _notify(self) -> None:
        os.eventfd_write(self.wake, 1)


def serve(endpoint: str, descriptor: int, parent: int) -> None:
    """Run until the parent closes or is gone."""
    setup = wire.decode_setup(_read_setup())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(endpoint)
    try:
        worker = Worker(setup, descriptor, socket)
    except DirectoryError as error:
        socket.send(wire.encode(wire.Refused(str(error))))
        os.read(_STDIN, 1)  # the parent ends this process when it has read why
        return
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(worker.wake, zmq.POLLIN)
    poller.register(_STDIN, zmq.POLLIN | zmq.POLLERR)
    going_on = True
    while going_on:
        worker.report()
        ready = dict(poller.poll(int(wire.HEARTBEAT_S * 1000)))
        if _STDIN in ready or os.getppid() != parent:
            os._exit(1)
        if worker.wake in ready:
            os.eventfd_read(worker.wake)
        for _ in range(_BURST):
            try:
                requests = wire.decode_requests(socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            going_on = all(map(worker.take, requests))
            if not going_on:
                break
    worker.report()
    socket.close()
    context.term()


def _read_setup() -> bytes:
    size = int.from_bytes(os.read(_STDIN, 8), "little")
    setup = b""
    while len(setup) < size:
        more = os.read(_STDIN, size - len(setup))
        if not more:
            os._exit(1)
        setup += more
    return setup


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s hc-io] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    endpoint, descriptor, parent = sys.argv[1:]
    serve(endpoint, int(descriptor), int(parent))


if __name__ == "__main__":
    main()
