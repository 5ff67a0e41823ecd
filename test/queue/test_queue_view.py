"""What a pass over the waiting queue tells the tiers, and when."""

from __future__ import annotations

from functools import partial

from sglang_hc.queue.queue_view import QueueView
from sglang_hc.queue.requests import QueuedPrompt
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.fake_io import FakeIo
from support.host import host_queue, identities


def view(*, tell_disk: bool = True) -> tuple[QueueView, FakeIo]:
    below = FakeIo(capacity=100)
    queue = host_queue(100, below, hint_disk=tell_disk).queue
    for _ in range(9):
        queue.finished("earlier", 2)
    return queue, below


def waiting(rid: str) -> QueuedPrompt:
    """Requests a1, a2 ... share their first block."""
    tokens = [ord(rid[0])] * 64 + [int(rid[1:])] * 64
    return QueuedPrompt(Prefix(None, pack_tokens(tokens)), lambda: 0)


def arrive(queue: QueueView, *rids: str) -> None:
    for rid in rids:
        queue.arrived(rid, partial(waiting, rid))


def ids(rid: str) -> list[bytes]:
    return identities(waiting(rid).prompt.tokens)


def test_the_disk_is_told_what_changed_and_only_then() -> None:
    queue, below = view()
    arrive(queue, "a1", "a2", "b1")
    queue.on_schedule_step(["a1", "a2", "b1"])
    shared, own = ids("a2")
    first, second, third = (below.uses[ids(rid)[1]] for rid in ("a1", "a2", "b1"))
    assert None not in (first, second, third)
    assert below.uses[shared] == first < second == below.uses[own] < third  # type: ignore[operator]
    queue.on_schedule_step(["a1", "a2", "b1"])
    assert below.hints == 1
    queue.on_schedule_step(["a2", "b1"])
    assert below.uses[ids("a1")[1]] is None
    assert below.uses[shared] == second, "it is now needed by the next one"
    queue.left("a2")
    queue.left("b1")
    queue.on_schedule_step([])
    assert set(below.uses.values()) == {None}


def test_a_disk_that_evicts_by_age_is_told_nothing() -> None:
    queue, below = view(tell_disk=False)
    arrive(queue, "a1")
    queue.on_schedule_step(["a1"])
    assert below.hints == 0


def test_reads_begin_at_once() -> None:
    """A forward pass may lie between them and the next poll."""
    below = FakeIo(capacity=100)
    below.hold(ids("a1") + ids("b1"))
    queue = host_queue(100, below).queue
    arrive(queue, "a1")
    queue.on_schedule_step(["a1"])
    assert below.begun == ids("a1")
    arrive(queue, "b1")
    queue.ready("b1")  # its turn has come, and nobody looked at the queue since
    assert below.begun == ids("a1") + ids("b1")
