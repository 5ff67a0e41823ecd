"""Operations are gathered and leave together: in order, none held back, none lost unseen."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.store.block_io import BlockDone, SlotRead, SlotWrite
from sglang_hc.store.disk import Block
from sglang_hc.store.executor import Completion, CopyRows
from sglang_hc.store.host_memory import HostMemory, MemorySpec
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.process import messages as wire
from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.clients import ProcessBlocks, ProcessExecutor
from sglang_hc.store.process.opening import open_io
from sglang_hc.store.process.supervisor import IoSupervisor, State

LAYOUT = BlockLayout(LayerPlan(0, 1, 0), StateShape(1, 8, (8, 8), "float32"))
MEMORY = HostMemory(MemorySpec(LAYOUT, 4, BLOCK_TOKENS, 1))
MOST = wire.REQUESTS_PER_MESSAGE


class FakeLink:
    """A process that remembers what came to it, and answers when told to."""

    pid = 1

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.messages: list[list[wire.Request]] = []
        self.replies: deque[wire.Reply] = deque([wire.Ready(8)])
        self._unanswered: deque[wire.Request] = deque()

    def connected(self) -> None:
        """There is no socket."""

    def send(self, requests: list[wire.Request]) -> None:
        message = wire.decode_requests(wire.encode(requests))
        self.messages.append(message)
        self._unanswered.extend(message)

    def receive(self) -> wire.Reply | None:
        return self.replies.popleft() if self.replies else None

    def kill(self) -> None:
        self.exit_code = -9

    def close(self) -> None:
        """There is nothing to give back."""

    def answer(self, count: int) -> None:
        """Do the oldest operations."""
        scattered, blocks = [], []
        for _ in range(min(count, len(self._unanswered))):
            request = self._unanswered.popleft()
            if isinstance(request, wire.Execute):
                scattered.append(Completion(request.ticket, True))
            elif isinstance(request, (SlotRead, SlotWrite)):
                blocks.append(BlockDone(request.ticket, Outcome.OK, "disk"))
        self.replies.append(wire.Answers(scattered, blocks, {}, 1, {}))


class Run:
    """A supervisor and both its clients over fake processes."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.stillborn = 0
        """How many of the next processes die with their first word."""
        self._now = 0.0
        self.supervisor = IoSupervisor(
            wire.Setup(MEMORY.spec, None), 0, Counter(), lambda: self._now
        )
        self.executor = ProcessExecutor(self.supervisor, MEMORY)
        self.blocks = ProcessBlocks(self.supervisor)
        with mock.patch.object(io_supervisor, "IoLink", self._start):
            self.supervisor.start()

    def _start(self, setup: wire.Setup, descriptor: int) -> FakeLink:
        self.links.append(FakeLink())
        if self.stillborn:
            self.stillborn -= 1
            self.link.kill()
        return self.link

    @property
    def link(self) -> FakeLink:
        return self.links[-1]

    def replace(self) -> None:
        """The process is gone; the supervisor learns it and starts another."""
        self.link.kill()
        count = len(self.links)
        with mock.patch.object(io_supervisor, "IoLink", self._start):
            while len(self.links) == count or self.supervisor.state is not State.UP:
                self._now += 0.1
                self.supervisor.poll()


steps = st.lists(
    st.one_of(st.integers(1, 2 * MOST + 1), st.sampled_from(["flush", "poll", "replace"])),
    max_size=12,
)


@settings(deadline=None)
@given(steps)
def test_every_request_leaves_in_order_and_in_time(steps: list[int | str]) -> None:
    """A number stands for so many requests. Nothing is held back beyond a flush or a poll, and a
    process hears nothing of what was meant for the one before it."""
    run = Run()
    sent: list[bytes] = []
    names = itertools.count()
    for step in steps:
        if isinstance(step, int):
            for _ in range(step):
                sent.append(next(names).to_bytes(16, "big"))
                run.supervisor.send(wire.Touch([sent[-1]]))
        elif step == "replace":
            run.replace()
            sent = []
        else:
            getattr(run.supervisor, step)()
        came = [request.block_ids[0] for message in run.link.messages for request in message]
        assert came == sent[: len(came)]
        assert len(sent) - len(came) < MOST
        if step in ("flush", "poll"):
            assert came == sent
        assert all(0 < len(message) <= MOST for message in run.link.messages)


def test_what_was_meant_for_a_process_that_died_at_once_reaches_no_other() -> None:
    run = Run()
    run.blocks.erase(1, None, ())
    run.stillborn = 1
    run.replace()
    run.supervisor.poll()
    assert len(run.links) == 3 and run.links[1].messages == run.link.messages == []
    assert [(done.ticket, done.outcome) for done in run.blocks.poll()] == [(1, Outcome.LOST)]
    assert run.blocks.write(2, Block(bytes(16), bytes(16), "", 0, b"t"), 0, 1e9), "open again"


kinds = st.sampled_from(["read", "write", "copy", "touch"])
events = st.one_of(kinds, kinds, st.integers(1, 8), st.sampled_from(["flush", "poll", "replace"]))


@settings(deadline=None)
@given(st.lists(events, max_size=60))
def test_every_operation_is_answered_once(events: list[int | str]) -> None:
    """A number stands for so many answers. What a lost process had is given up, whether it had
    been sent or only gathered."""
    run = Run()
    block = Block(bytes(16), bytes(16), "", 0, b"t")
    open_blocks: dict[int, bool] = {}
    """By ticket: whether a process was lost since."""
    open_copies: list[int] = []
    tickets = itertools.count(1)

    def take() -> None:
        for done in run.blocks.poll():
            assert (done.outcome is Outcome.LOST) == open_blocks.pop(done.ticket)
        for completion in run.executor.poll():
            assert completion.ticket == open_copies.pop(0), "in order, across a loss too"

    for event in events:
        if isinstance(event, int):
            run.link.answer(event)
        elif event == "read":
            ticket = next(tickets)
            run.blocks.read(ticket, bytes(16), 0, 1e9)
            open_blocks[ticket] = False
        elif event == "write":
            ticket = next(tickets)
            assert run.blocks.write(ticket, block, 0, 1e9)
            open_blocks[ticket] = False
        elif event == "copy":
            open_copies.append(next(tickets))
            run.executor.submit(open_copies[-1], CopyRows(0, 1, 1))
        elif event == "touch":
            run.blocks.touch([bytes(16)])
        elif event == "flush":
            run.blocks.flush()
        else:
            take()  # what was answered is not lost
            if event == "replace":
                open_blocks = dict.fromkeys(open_blocks, True)
                run.replace()
    run.blocks.flush()
    while open_blocks or open_copies:
        take()
        run.link.answer(len(events))


def test_a_burst_arrives_in_order() -> None:
    """At a real process: each copy takes what the one before it left."""
    io = open_io("process", MEMORY.spec, None)
    io.memory.pool.hidden[0] = 7
    chain = [CopyRows(step % 4, (step + 1) % 4, BLOCK_TOKENS) for step in range(5 * MOST + 3)]
    for ticket, copy in enumerate(chain):
        io.executor.submit(ticket, copy)
    assert io.executor.drain() == [Completion(ticket, True) for ticket in range(len(chain))]
    assert (io.memory.pool.hidden == 7).all()
    io.executor.close()


def test_hints_reach_a_process_without_a_directory_in_use() -> None:
    """What was no longer needed while the directories paused stayed needed for ever."""
    run = Run()
    run.link.replies.append(wire.Answers([], [], {}, 0, {}))
    run.blocks.poll()
    assert run.blocks.levels()["disk_directories"] == 0
    run.blocks.expect({bytes(16): None})
    run.blocks.flush()
    assert run.link.messages == [[wire.Expect({bytes(16): None})]]
