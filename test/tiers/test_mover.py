"""Whatever is where, and whatever fails, a moved block holds the bytes of its original."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan, StateShape
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.overflow import Cut, OverflowRule
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.mover import BlockMover
from sglang_hc.queue.prefetch import PATIENCE
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.queue.requests import QueuedPrompt
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.block_tree import BlockNode, Moved
from sglang_hc.tree.cuts import EarlierCuts, EarlierPath
from sglang_hc.tree.identity import BlockPath, Prefix, pack_tokens
from support.examples import examples
from support.fake_io import FakeIo
from support.host import FINGERPRINT, host_tier, identities, keep
from support.rates import UNKNOWN_COSTS
from support.tiers import StepExecutor

RULE = OverflowRule(window=512, keep_first=64, drop=0.4, reserve=64)
"""Steps of 128 tokens."""

TOKENS = [(i * 31) % 997 for i in range(900)]
LAYOUT = BlockLayout(LayerPlan(0, 1, 1), StateShape(2, 8, (8, 8), "uint8"))


def mark(block_id: bytes) -> np.ndarray:
    """The bytes of a block's state, which nobody else has."""
    return np.frombuffer(hashlib.shake_256(block_id).digest(LAYOUT.slot_bytes), dtype=np.uint8)


def kept(dropped: int, length: int) -> bytes:
    return pack_tokens(TOKENS[:64] + TOKENS[64 + dropped : length])


def space(dropped: int) -> str | None:
    return f"cut {dropped}" if dropped else None


def prompt_behind(cut: Cut, length: int) -> Prefix:
    """What a cut leaves of a prompt of `length` tokens."""
    return Prefix(space(cut.dropped), kept(cut.dropped, length))


def earlier(cut: Cut) -> EarlierCuts:
    before = RULE.earlier(cut)
    left_out = pack_tokens(TOKENS[64 + before[-1] : 64 + cut.dropped])
    if before[-1]:
        before.append(0)
    return EarlierCuts(64, cut.dropped, tuple((n, space(n)) for n in before), left_out)


class World:
    """Tiers below the device, and one conversation."""

    def __init__(self, slots: int = 48, *, disk: bool = True) -> None:
        self.host = host_tier(slots)
        self.pool = HostPool(LAYOUT, slots)
        self.io = FakeIo(self.pool)
        self.disk = LowerTier(self.io, self.host, lambda: 0.0) if disk else None
        self.executor = StepExecutor(self.pool, [])
        self.scatters = ScatterQueue(self.executor, self.host)
        self.counters: Counter[str] = Counter()
        self.now = 0.0
        self.mover = BlockMover(
            self.host, self.disk, self.scatters, self.counters, lambda: self.now
        )
        self.places: dict[bytes, int] = {}
        """Of each state that was computed: which block of its path it is."""

    def compute(self, dropped: int, length: int) -> None:
        """A turn of `length` tokens was served: what host memory lacks of it was computed."""
        path = kept(dropped, length)
        for node in keep(self.host, path, space(dropped)):
            self.pool.slot(node.slot)[:] = mark(node.block_id)
            self.places[node.block_id] = len(node.path()) - 1
            if self.disk is not None:
                self.disk.write_through(node)
        if self.disk is not None:
            self.disk.poll()

    def cut(self, length: int) -> tuple[Cut, BlockPath, tuple[EarlierPath, ...]]:
        """The cut of a turn of `length` tokens, its path and where its blocks were."""
        cut = RULE.cut(length, None)
        prompt = prompt_behind(cut, length)
        path = BlockPath(prompt, identities(prompt.tokens, prompt.namespace))
        return cut, path, earlier(cut).paths(FINGERPRINT, prompt.tokens)

    def move(self, length: int) -> int:
        """Begin to move what can be moved for a turn; returns how many blocks."""
        _, path, ways = self.cut(length)
        ids = path.block_ids
        first = next((i for i, b in enumerate(ids) if not self.host.has(b)), len(ids))
        found = self.mover.find(path, ways, first)
        assert found is not None
        return self.mover.fetch(path, ways, first, len(found), None)

    def end(self) -> None:
        """Carry out what is under way."""
        self.scatters.drain()
        self.io.end_all()
        if self.disk is not None:
            self.disk.poll()

    def blocks(self, length: int) -> list[BlockNode]:
        prompt = prompt_behind(RULE.cut(length, None), length)
        return list(self.host.tree.match(prompt).nodes)

    def check(self) -> None:
        """Every block has the bytes it should, no slot is lost, nothing is pinned."""
        self.host.check_integrity()
        assert not self.host.staged_slots and not len(self.mover.coming)
        for node in self.host.tree.nodes():
            assert node.pins == 0 and node.ready
            origin, shift = node.moved or Moved(node.block_id, 0)
            assert np.array_equal(self.pool.slot(node.slot), mark(origin))
            place = len(node.path()) - 1
            assert self.places[origin] - place == shift // BLOCK_TOKENS


def test_the_head_and_what_is_behind_the_cut_move() -> None:
    world = World(disk=False)
    world.compute(0, 440)
    assert world.move(480) == 4
    world.end()
    moved = [node.moved for node in world.blocks(480)]
    whole = identities(kept(0, 440))
    assert moved == [Moved(whole[0], 0), *(Moved(whole[i], 128) for i in (3, 4, 5))]
    assert world.counters["overflow_moved_tokens"] == 3 * BLOCK_TOKENS
    world.check()


def test_bytes_that_are_not_in_place_are_waited_for() -> None:
    world = World(disk=False)
    world.compute(0, 440)
    cut, path, ways = world.cut(480)
    last = world.host.tree.match(Prefix(None, kept(0, 384))).nodes[-1]
    last.ready = False
    assert world.mover.find(path, ways, 0) is None
    world.host.mark_ready(last)
    assert world.mover.find(path, ways, 0) == [SourceTier.HOST] * 4
    assert cut.dropped == 128


def test_making_room_does_not_take_what_is_copied() -> None:
    world = World(slots=9, disk=False)
    world.compute(0, 440)  # 7 blocks, the tail included
    assert 0 < world.move(480) <= 4
    world.end()
    world.check()


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_restart_blocks_come_from_where_they_were_computed(lost: bool) -> None:
    world = World()
    world.compute(0, 440)
    world.move(480)
    world.end()
    world.compute(128, 520)
    world.host.clear()
    if lost:  # the disk has evicted one of the originals
        world.io._blocks.pop(identities(kept(0, 440))[4])
    assert world.move(520) == (2 if lost else 6)
    world.end()
    assert len(world.blocks(520)) == (2 if lost else 6)
    world.check()


def queue_with_a_turn(world: World) -> tuple[LookAhead, QueueView]:
    """A turn of 480 tokens waits in it, as "r"."""
    window = LookAhead()
    view = QueueView(world.host, world.disk, window, QueueRules(), UNKNOWN_COSTS, mover=world.mover)
    cut = RULE.cut(480, None)
    waiting = QueuedPrompt(prompt_behind(cut, 480), lambda: 0, earlier(cut))
    view.arrived("r", lambda: waiting)
    view.on_schedule_step(["r"])
    return window, view


@pytest.mark.parametrize("disk", [False, True])
def test_a_request_waits_until_its_state_has_moved(disk: bool) -> None:
    world = World(disk=disk)
    world.compute(0, 440)
    if disk:
        world.host.clear()
    window, view = queue_with_a_turn(world)
    whole = identities(kept(0, 440))
    assert all(window.next_use(whole[i]) is not None for i in (0, 3, 4, 5)), "they are needed"
    assert window.next_use(whole[1]) is None, "it was dropped"
    assert not view.ready("r")
    world.end()
    assert view.ready("r")
    assert view.take_loaded("r") == (4 * BLOCK_TOKENS if disk else 0)
    assert len(world.blocks(480)) == 4
    world.check()


def test_without_a_disk_a_wait_ends_on_the_clock_of_decisions() -> None:
    """Ranks that looked at their own clocks gave up in different passes, and then ran different
    batches."""
    world = World(disk=False)
    world.compute(0, 440)
    _, view = queue_with_a_turn(world)
    world.now = 1e9
    assert not view.ready("r")
    world.now += 2 * PATIENCE
    assert view.ready("r")
    world.end()


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_turns_under_any_losses(data: st.DataObject) -> None:
    """Turns of a growing conversation; between them host memory loses blocks, copies and reads
    fail, the disk forgets. What is served is always what was computed for these tokens."""
    world = World(slots=data.draw(st.integers(16, 48)), disk=data.draw(st.booleans()))
    lengths = data.draw(st.lists(st.integers(300, 900), min_size=2, max_size=7).map(sorted))
    for length in lengths:
        cut = RULE.cut(length, None)
        if cut.dropped:
            world.executor.fail_next = data.draw(st.integers(0, 2))
            world.move(length)
            world.scatters.drain()
            for _ in range(data.draw(st.integers(0, 2))):
                world.io.step(data.draw(st.sampled_from([Outcome.IO_ERROR, Outcome.TIMED_OUT])))
            world.executor.fail_next = 0
            world.end()
        world.check()
        world.compute(cut.dropped, length)
        world.check()
        world.host.evict(data.draw(st.integers(0, 12)), 0.0)
        for block_id in list(itertools.islice(world.io.held(), data.draw(st.integers(0, 3)))):
            world.io._blocks.pop(block_id)
