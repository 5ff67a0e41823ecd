"""The I/O process: scatters snapshots, writes and reads blocks, apart from the scheduler's GIL.

    python -m sglang_hc.store.process.worker ENDPOINT MEMORY PARENT

ENDPOINT: of the ZMQ pair, bound by the parent. MEMORY: inherited descriptor of the memory file.
PARENT: its process id. Started by `supervisor.IoLink`, never by hand. It ends by itself when the
parent is gone; what it was writing is then as after any crash: whole and verifiable, or not there.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections import Counter, deque

import msgspec
import zmq

from sglang_hc.store.block_io import SlotRead, SlotWrite
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.executor import ThreadExecutor
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import messages as wire

logger = logging.getLogger(__name__)

_BURST = 4
"""Messages taken before answers are sent again."""
_LINGER_MS = 5000


class Worker:
    """Executor and disk of this process behind messages. Belongs to the main thread."""

    def __init__(self, setup: wire.Setup, descriptor: int, socket: zmq.Socket[bytes]) -> None:
        """Raises DirectoryError."""
        self._socket = socket
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is something to answer."""
        self._outbox: deque[bytes] = deque()
        self._changed: deque[bytes] = deque()
        """Identities that came or left, and that the parent has not been told of yet."""
        self._growth: Counter[str] = Counter()
        """What was counted and not yet said."""
        self._sent = 0.0
        memory = HostMemory(setup.memory, descriptor)
        self._executor = ThreadExecutor(memory.pool, memory.snapshots, self._notify)
        self.disk: DiskThreads | None = None
        if setup.disk is not None:
            store = setup.disk.open(setup.memory.layout)
            self.disk = DiskThreads(store, memory.pool, self._growth, self._notify)
        while (answers := self._answers()).changes:
            self._outbox.append(wire.encode(answers))
        capacity = 0 if self.disk is None else self.disk.capacity
        self._outbox.append(wire.encode(wire.Ready(capacity)))

    def take(self, request: wire.Request) -> bool:
        """Begin what is asked for. False: it was the last request, and everything is done."""
        if isinstance(request, wire.Execute):
            self._executor.submit(request.ticket, request.operation)
        elif isinstance(request, wire.Close):
            self._executor.close()
            if self.disk is not None:
                self.disk.close()
            return False
        elif self.disk is not None:
            self._take_for_disk(self.disk, request)
        return True

    def _take_for_disk(self, disk: DiskThreads, request: wire.DiskRequest) -> None:
        if isinstance(request, SlotWrite):
            if not disk.write(request.ticket, request.block, request.slot, request.deadline):
                disk.answer(request.ticket, Outcome.DROPPED)  # every directory has too many
        elif isinstance(request, SlotRead):
            disk.read(*msgspec.structs.astuple(request))
        elif isinstance(request, wire.Touch):
            disk.touch(request.block_ids)
        elif isinstance(request, wire.Expect):
            disk.expect(request.uses)
        else:
            disk.erase(request.ticket, request.what, ())

    def report(self) -> None:
        """Send answers and the heartbeat. What the parent does not take now is sent later."""
        answers = self._answers()
        said = answers.scattered, answers.blocks, answers.changes, answers.counts
        beat = not self._outbox and time.monotonic() >= self._sent + wire.HEARTBEAT_S
        if beat or any(said):
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
        if self.disk is None:
            return wire.Answers(scattered, [], {}, 0, {})
        blocks = self.disk.poll()
        self._changed.extend(self.disk.changes())  # after the answers: what was written may be gone
        count = min(len(self._changed), wire.IDS_PER_MESSAGE)
        names = [self._changed.popleft() for _ in range(count)]
        changes = {name: bool(self.disk.contains([name])) for name in names}
        if self._changed:
            self._notify()  # the rest goes with the next report, at once
        counts = dict(self._growth)
        self._growth.clear()
        directories = self.disk.levels()["disk_directories"]
        return wire.Answers(scattered, blocks, changes, directories, counts)

    def _notify(self) -> None:
        os.eventfd_write(self.wake, 1)


def _end_with(parent: int) -> None:
    """End this process when the parent is gone, whatever it is doing: a start may take minutes, and
    the next server needs the directories' locks."""
    while os.getppid() == parent:
        time.sleep(wire.HEARTBEAT_S)
    os._exit(1)


def serve(endpoint: str, descriptor: int, parent: int) -> None:
    """Run until the parent closes or is gone."""
    threading.Thread(target=_end_with, args=(parent,), name="hc-parent", daemon=True).start()
    setup = wire.decode_setup(sys.stdin.buffer.read())
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = _LINGER_MS
    socket.connect(endpoint)
    try:
        worker = Worker(setup, descriptor, socket)
    except DirectoryError as error:
        socket.send(wire.encode(wire.Refused(str(error))))
        signal.pause()  # the parent ends this process when it has read why
        return
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(worker.wake, zmq.POLLIN)
    going_on = True
    while going_on:
        worker.report()
        ready = dict(poller.poll(int(wire.HEARTBEAT_S * 1000)))
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


def main() -> None:
    logging.basicConfig(
        level=logging.INFO, format="[%(asctime)s hc-io] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    for to_all in (signal.SIGINT, signal.SIGTERM):
        signal.signal(to_all, signal.SIG_IGN)  # the parent decides when it ends
    endpoint, descriptor, parent = sys.argv[1:]
    serve(endpoint, int(descriptor), int(parent))


if __name__ == "__main__":
    main()
