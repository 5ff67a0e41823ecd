"""Keeps one I/O process running, and says when nothing of a dead one can touch the memory any more.

    starting -> up -> ending -> down -> starting ...
       |________________^

    starting   started, its store is being opened; operations cannot be sent yet
    up         operations are sent and answered
    ending     killed, or found dead or hung: it may still touch the memory until it was reaped,
               which never comes while its disk does not answer; scatters go on without it
    down       nobody touches the memory; the next start waits for the back-off to pass

A process that hangs is killed: one that says nothing for HANG_S, or leaves an operation unanswered
for OVERDUE_S behind its deadline. Every loss costs what was under way and is said once in the log.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import msgspec

from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.process import messages as wire
from sglang_hc.store.process.link import IoLink

logger = logging.getLogger(__name__)

HANG_S = 15.0
OVERDUE_S = 300.0
"""Beyond its deadline an operation may still be in one piece of a slow disk's work."""
START_S = 600.0
"""Longest that a starting process may read and write nothing. All of it may take much longer: a
damaged index is made again from the slots."""
REAP_S = 5.0
"""How long after it was killed a process that is not reaped counts as one that will not end."""
FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0
CLOSE_S = 60.0
_BURST = 256


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

    def will_not_end(self) -> int:
        """The process was killed some time ago and executes nothing any more, but it is not reaped:
        a call of the system has not come back, and may still write to the slots that it reads into.
        Give up what it cannot touch any more; returns how many operations."""

    def earliest_deadline(self) -> float:
        """Of what was sent; infinity when nothing is under way."""


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
        self._progress = 0
        self._ending_since: float | None = None
        """Since when it is ending, until its clients were told that it will not."""
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

        Raises DirectoryError with a message for users, also when it does nothing for START_S, and
        OSError when no process can be started.
        """
        self._link = link = IoLink(self._setup, self._descriptor)
        self.state, self._heard = State.STARTING, self._clock()
        while self.state is State.STARTING:
            reply = link.receive()
            if reply is not None:
                self._take(link, reply)
            elif link.exit_code is not None:
                reason = self._ended(link.exit_code)
                raise OSError(f"the I/O process ended at its start: {reason}")
            elif self._clock() >= self._next_check:
                self._next_check = self._clock() + 0.05
                self._check(link)
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
        """Let the process finish what was sent, and wait for its end for at most CLOSE_S. One that
        does not end when it is killed is left behind."""
        if self._closing:
            return
        self._closing = True
        if self._coming is not None:
            wait([self._coming], CLOSE_S)
            if not self._coming.done():
                return
            self._meet()
        if self.state is State.UP:
            self.send(wire.Close())
            self.flush()
        elif self._link is not None:
            self._link.kill()
        killed = self.state is not State.UP
        end = self._clock() + (REAP_S if killed else CLOSE_S)
        while (link := self._link) is not None:
            self._receive(link)
            if link.exit_code is not None:
                self._receive(link)
                self._bury(link)
            elif self._clock() < end:
                time.sleep(0.001)
            elif killed:
                logger.error("sglang-hc: the I/O process %d does not end; left behind", link.pid)
                self._give_up()
                link.close()  # a socket that is only dropped blocks whoever collects the garbage
                return
            else:
                logger.warning("the I/O process did not end in time; killing it")
                link.kill()
                killed, end = True, self._clock() + REAP_S

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
            before, self._progress = self._progress, link.progress
            if before != self._progress:
                self._heard = now
            elif now >= self._heard + START_S:
                self._end(
                    "--hc-disk: a directory does not answer, the I/O process read and wrote nothing"
                    f" for {START_S:.0f} s at its start; see to the disk, or leave it out"
                )
        elif self.state is State.ENDING:
            if self._ending_since is not None and now >= self._ending_since + REAP_S:
                logger.error(
                    "sglang-hc: the I/O process %d was killed and does not end: its disk does not "
                    "answer. No disk tier until it does", link.pid,
                )  # fmt: skip
                self._give_up()
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
        self.state, self._ending_since = State.ENDING, self._clock()

    def _give_up(self) -> None:
        """It was killed and is not reaped."""
        self._ending_since = None
        lost = sum(client.will_not_end() for client in self.clients)
        self.counts["io_lost_operations"] += lost

    def _ended(self, code: int | None) -> str:
        return self._reason or (f"signal {-code}" if code and code < 0 else f"exit status {code}")

    def _bury(self, link: IoLink) -> None:
        """The process was reaped: give up its operations."""
        now, reason = self._clock(), self._ended(link.exit_code)
        self._link, self._reason, self._ending_since = None, "", None
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
