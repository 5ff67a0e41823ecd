"""Keeps one I/O process running, and says when nothing of a dead one can touch the memory any more.

    starting -> up -> ending -> down -> starting ...
       |________________^

    starting   started, its store is being opened; operations cannot be sent yet
    up         operations are sent and answered
    ending     killed, or found dead or hung: it may still touch the memory until it was reaped
    down       nobody touches the memory; the next start waits for the back-off to pass

A process that hangs is killed: one that says nothing for HANG_S, or leaves an operation unanswered
for OVERDUE_S behind its deadline. Every loss costs what was under way and is said once in the log.
"""

from __future__ import annotations

import enum
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

import sglang_hc
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.process import messages as wire

logger = logging.getLogger(__name__)

HANG_S = 15.0
OVERDUE_S = 300.0
"""Beyond its deadline an operation may still be in one piece of a slow disk's work."""
START_S = 600.0
"""Longest a restart may take: a damaged index is made again from the slots."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
CLOSE_S = 60.0
_BURST = 256
_READABLE = int(zmq.POLLIN)  # as the flag that it is, each test would cost as much as a look


class State(enum.Enum):
    STARTING = enum.auto()
    UP = enum.auto()
    ENDING = enum.auto()
    DOWN = enum.auto()


class Client(Protocol):
    """Whoever has operations under way."""

    def answered(self, answers: wire.Answers) -> None:
        """A message came."""

    def up(self) -> None:
        """Operations can be sent from now on."""

    def lost(self) -> int:
        """The process is lost: no operation that it had will be answered, and nothing touches their
        memory any more. Returns how many there were."""

    def earliest_deadline(self) -> float:
        """Of what was sent; infinity when nothing is under way."""


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
        """Give back what belongs to a process that has ended."""
        self._socket.close()
        self._context.term()
        self.connected()


def _environment() -> dict[str, str]:
    """This very package, and no thread pools of numerical libraries."""
    root = str(Path(sglang_hc.__file__).parents[1])
    others = os.environ.get("PYTHONPATH")
    path = root if not others else os.pathsep.join([root, others])
    return {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class IoSupervisor:
    """See the module. Belongs to the scheduler thread; `poll` never waits."""

    def __init__(
        self,
        setup: wire.Setup,
        descriptor: int,
        counts: Counter[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """counts: gets the losses and restarts."""
        self._setup = setup
        self._descriptor = descriptor
        self._clock = clock
        self.clients: list[Client] = []
        self.state = State.DOWN
        self.capacity = 0
        self.counts = counts
        self._link: IoLink | None = None
        self._gathered: list[wire.Request] = []
        self._thread = ThreadPoolExecutor(1, "hc-io-start")
        """Starts links and closes them: both take longer than a scheduling pass should."""
        self._coming: Future[IoLink] | None = None
        self._since = 0.0
        self._up_since = float("inf")
        self._heard = 0.0
        self._next_check = 0.0
        self._backoff = FIRST_BACKOFF_S
        self._reason = ""
        self._closing = False

    @property
    def pid(self) -> int | None:
        """Of the process there is."""
        return None if self._link is None else self._link.pid

    def start(self) -> None:
        """Start the first process and wait until it is up, however long its index takes.

        Raises DirectoryError with a message for users, OSError when no process can be started.
        """
        self._link = link = IoLink(self._setup, self._descriptor)
        self.state = State.STARTING
        while self.state is State.STARTING:
            reply = link.receive()
            if reply is not None:
                self._take(link, reply)
            elif link.exit_code is not None:
                reason = self._ended(link.exit_code)
                raise OSError(f"the I/O process ended at its start: {reason}")
            else:
                time.sleep(0.001)
        if self.state is not State.UP:
            message = self._reason
            self.close()
            raise DirectoryError(message)

    def send(self, request: wire.Request) -> None:
        """Only while `state` is UP. Leaves with the next `flush` or `poll`: a message costs more
        than all that is in it."""
        gathered = self._gathered
        gathered.append(request)
        if len(gathered) == wire.REQUESTS_PER_MESSAGE:
            self.flush()

    def flush(self) -> None:
        """Send what was gathered now. If the process is gone, it is lost with it."""
        if self._gathered and self._link is not None:
            gathered, self._gathered = self._gathered, []
            self._link.send(gathered)

    def poll(self) -> None:
        """Send what was gathered; take in what the process says; notice its end; start it again
        when it is time."""
        if self.state is State.DOWN:
            if not self._closing and self._clock() >= self._since + self._backoff:
                self._start_again()
            return
        if self._coming is not None:
            if self._coming.done():
                self._meet()
            return
        assert self._link is not None
        if self.state is not State.ENDING:
            self.flush()
            self._receive(self._link)
        if self._clock() >= self._next_check:
            self._next_check = self._clock() + 0.05
            self._check(self._link)

    def close(self) -> None:
        """Let the process finish what was sent, and wait for its end for at most CLOSE_S."""
        if self._closing:
            return
        self._closing = True
        if self._coming is not None:
            self._meet()
        if self.state is State.UP:
            self.send(wire.Close())
            self.flush()
        elif self._link is not None:
            self._link.kill()
        end = self._clock() + CLOSE_S
        while (link := self._link) is not None:
            self._receive(link)
            if link.exit_code is not None:
                self._receive(link)
                self._bury(link)
            elif self._clock() >= end:
                logger.warning("the I/O process did not end in time; killing it")
                link.kill()
                end = float("inf")
            else:
                time.sleep(0.001)

    # -- messages --------------------------------------------------------------------------------

    def _receive(self, link: IoLink) -> None:
        taken = 0
        for _ in range(_BURST):
            try:
                reply = link.receive()
            except msgspec.DecodeError as error:
                self._end(f"it said something that is no message ({error})")
                return
            if reply is None:
                return
            taken += self._take(link, reply)
            if taken >= wire.IDS_PER_MESSAGE:
                return  # the rest in the next pass: the scheduler thread has other things to do

    def _take(self, link: IoLink, reply: wire.Reply) -> int:
        """Returns how many identities it names."""
        self._heard = self._clock()
        if isinstance(reply, wire.Ready):
            link.connected()
            self.capacity = reply.capacity
            self.state, self._up_since = State.UP, self._heard
            if self.counts["io_losses"]:
                self.counts["io_restarts"] += 1
                logger.warning("sglang-hc: the I/O process is back, as process %d", link.pid)
            for client in self.clients:
                client.up()
            return 0
        if isinstance(reply, wire.Refused):
            self._end(reply.message)
            return 0
        for client in self.clients:
            client.answered(reply)
        return len(reply.changes)

    # -- life ------------------------------------------------------------------------------------

    def _check(self, link: IoLink) -> None:
        """Nothing was to be read just now, or not all of it."""
        now = self._clock()
        if link.exit_code is not None:
            self._bury(link)
        elif self.state is State.STARTING:
            if now >= self._since + START_S:
                self._end(f"it was not ready after {START_S:.0f} s")
        elif self.state is State.UP:
            if now >= self._heard + HANG_S:
                self._end(f"it said nothing for {HANG_S:.0f} s")
            elif now >= OVERDUE_S + min(client.earliest_deadline() for client in self.clients):
                self._end(f"an operation is {OVERDUE_S:.0f} s overdue")

    def _end(self, reason: str) -> None:
        """Kill the process. Its operations are given up when it has been reaped."""
        assert self._link is not None
        if self.state is State.UP:
            logger.error("sglang-hc: ending the I/O process %d: %s", self._link.pid, reason)
        self._reason = reason
        self._link.kill()
        self.state = State.ENDING

    def _ended(self, code: int | None) -> str:
        return self._reason or (f"signal {-code}" if code and code < 0 else f"exit status {code}")

    def _bury(self, link: IoLink) -> None:
        """The process was reaped: give up its operations."""
        now, reason = self._clock(), self._ended(link.exit_code)
        self._link, self._reason = None, ""
        self._gathered.clear()
        if now >= self._up_since + LONGEST_BACKOFF_S:
            self._backoff = FIRST_BACKOFF_S
        self.state, self._since, self._up_since = State.DOWN, now, float("inf")
        lost = sum(client.lost() for client in self.clients)
        if self._closing:
            link.close()
            return
        self._thread.submit(link.close)
        self.counts["io_losses"] += 1
        self.counts["io_lost_operations"] += lost
        logger.error(
            "sglang-hc: the I/O process %d is gone (%s); %d operations are lost, their blocks are "
            "not kept or computed again. No disk tier until the next attempt, in %.1f s",
            link.pid, reason, lost, self._backoff,
        )  # fmt: skip

    def _start_again(self) -> None:
        now = self._clock()
        self.state, self._since, self._heard = State.STARTING, now, now
        self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)
        self._coming = self._thread.submit(IoLink, self._setup, self._descriptor)

    def _meet(self) -> None:
        """Take over the process that was started."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        try:
            self._link = coming.result()
        except Exception as error:
            self.state = State.DOWN
            logger.error("sglang-hc: the I/O process cannot be started: %s", error)
