"""Waiting requests and a remote store: asked early, read ahead, never waited for without end."""

from __future__ import annotations

from functools import partial

import pytest

from sglang_hc.queue.requests import QueuedPrompt
from sglang_hc.store import known_blocks as blocks
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix, pack_tokens
from support.clock import Clock
from support.host import host_queue, keep
from support.remote import SLOTS, FakeStore, make_blocks, make_pool, until
from support.waiting import HANGS_S

TOKENS = pack_tokens([7] * 64 + [8] * 64 + [9] * 10)


class Server:
    """Tiers of one server over a shared store."""

    def __init__(self, store: FakeStore, clock: Clock, prefetch: str = "queue") -> None:
        self.pool: HostPool = make_pool()
        self.io: KnownBlocks = make_blocks(store, self.pool, clock)
        _, self.host, self.disk, self.queue = host_queue(
            SLOTS, self.io, prefetch=prefetch, clock=clock
        )
        self.queue.finished("earlier", 2)
        self.looked: list[str] = []

    def arrive(self, *rids: str) -> None:
        for rid in rids:
            self.queue.arrived(rid, partial(self.look_at, rid))

    def look_at(self, rid: str) -> QueuedPrompt:
        self.looked.append(rid)
        return QueuedPrompt(Prefix(None, TOKENS), lambda: 0)

    def keep(self) -> None:
        """Compute both whole blocks and write them through."""
        for number, node in enumerate(keep(self.host, TOKENS[: 2 * BLOCK_BYTES]), 1):
            self.pool.slot(node.slot)[:] = number
            self.disk.write_through(node)
        self.disk.drain()

    def admit(self, rid: str) -> None:
        """Pass until the request may be admitted."""
        until(lambda: self.queue.ready(rid), self.disk.poll)


@pytest.fixture
def shared(store: FakeStore, clock: Clock) -> FakeStore:
    """A store that another server has written both blocks to."""
    other = Server(store, clock)
    other.keep()
    other.disk.close()
    assert len(store.values) == 2
    return store


def test_the_first_look_asks_and_a_later_one_reads(shared: FakeStore, clock: Clock) -> None:
    server = Server(shared, clock)
    server.arrive("a")
    server.queue.on_schedule_step(["a"])
    assert not server.queue.ready("a")
    until(
        lambda: server.disk.busy,
        lambda: (server.disk.poll(), server.queue.on_schedule_step(["a"])),
    )
    server.admit("a")
    assert server.host.tree.match(Prefix(None, TOKENS)).tokens == 128
    assert server.queue.take_loaded("a") == 128
    assert [
        int(server.pool.slot(n.slot)[0]) for n in server.host.tree.match(Prefix(None, TOKENS)).nodes
    ] == [1, 2]
    server.disk.close()


def test_on_arrival_the_read_starts_when_the_answer_is_there(
    shared: FakeStore, clock: Clock
) -> None:
    server = Server(shared, clock, prefetch="on-arrival")
    server.arrive("a")
    until(
        lambda: server.disk.busy,
        lambda: (server.disk.poll(), server.queue.on_schedule_step(["a"])),
    )
    server.admit("a")
    assert server.queue.take_loaded("a") == 128
    server.disk.close()


def test_a_miss_is_waited_for_once(store: FakeStore, clock: Clock) -> None:
    server = Server(store, clock)
    server.arrive("a", "b")
    assert not server.queue.ready("a")
    server.admit("a")
    assert server.host.staged_slots == 0
    assert server.queue.ready("b"), "the answer for the same blocks is still believed"
    server.disk.close()


def test_a_hung_lookup_holds_a_request_for_a_bounded_time(store: FakeStore, clock: Clock) -> None:
    server = Server(store, clock)
    server.arrive("a", "b")
    store.open.clear()
    assert not server.queue.ready("a")
    assert store.entered.wait(HANGS_S)
    clock.now += blocks.LOOKUP_S
    server.disk.poll()
    assert server.queue.ready("a")
    assert server.queue.ready("b")
    store.open.set()
    server.disk.close()


def test_a_hung_read_gives_its_slots_back(shared: FakeStore, clock: Clock) -> None:
    server = Server(shared, clock)
    server.arrive("a")
    server.queue.on_schedule_step(["a"])
    until(
        lambda: not server.io.ask(server.host.tree.identities(Prefix(None, TOKENS))),
        server.disk.poll,
    )
    shared.open.clear()
    shared.entered.clear()
    assert not server.queue.ready("a")
    assert shared.entered.wait(HANGS_S)
    assert server.host.staged_slots == 2
    clock.now += 11
    server.disk.poll()
    assert server.queue.ready("a")
    assert server.host.staged_slots == 0 and server.disk.counters["remote_read_timed_out"] >= 1
    shared.open.set()
    server.disk.close()
    server.host.check_integrity()


def test_a_request_that_leaves_stops_asking(store: FakeStore, clock: Clock) -> None:
    server = Server(store, clock, prefetch="on-arrival")
    store.open.clear()
    server.arrive("a")
    server.queue.left("a")
    server.arrive("b")
    server.queue.on_schedule_step(["b"])
    assert "a" not in server.looked
    store.open.set()
    server.disk.close()
