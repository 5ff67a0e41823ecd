"""Blocks that are restored as they come: any order of arrival, copies, failure and pressure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.meeting import Action
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.engine.intake import SERIAL
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.tree.ahead import RestoreAhead
from sglang_hc.srt.tree.device_tree import DeviceTree
from sglang_hc.srt.tree.prerestored import (
    PrerestoredBlocks,
    interleave_slots,
    missing_ranges,
)
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import BLOCK_BYTES
from sglang_hc.tree.promotions import Promotion
from support.examples import examples
from support.host import keep
from support.meeting_world import SPOKEN, WORD, World

STOP = len(WORD) * BLOCK_TOKENS
GARBAGE = b"garbage"
ME = Serial(1)


class Allocator:
    """Device slots; each is in one hand."""

    def __init__(self, slots: int) -> None:
        self.all = frozenset(range(slots))
        self.unused = set(self.all)

    def available_size(self) -> int:
        return len(self.unused)

    def alloc(self, count: int) -> torch.Tensor:
        taken = sorted(self.unused)[:count]
        self.unused -= set(taken)
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        freed = slots.tolist()
        assert not self.unused & set(freed) and len(set(freed)) == len(freed), "given back twice"
        self.unused |= set(freed)


class Copies:
    """Restorations whose copies are made when the test says so, in their order, from what the host
    slots hold then."""

    def __init__(self, content: dict[int, bytes]) -> None:
        self._content = content
        self._pending: deque[Restoration] = deque()
        self.device: dict[int, tuple[bytes, int]] = {}
        """Device slot: identity of the block and row whose state it holds."""
        self.restored: Counter[int] = Counter()

    def restore_early(self, restorations: Sequence[Restoration]) -> Copies:
        for restoration in restorations:
            self._pending.append(restoration)
            blocks = range(restoration.start // BLOCK_TOKENS, restoration.stop // BLOCK_TOKENS)
            self.restored.update(blocks)
        return self

    def step(self) -> None:
        if self._pending:
            restoration = self._pending.popleft()
            rows = [
                (self._content[span.slot], span.row + row)
                for span in restoration.spans(restoration.start, restoration.stop)
                for row in range(span.rows)
            ]
            self.device |= dict(zip(restoration.device_slots.tolist(), rows, strict=True))

    def wait(self) -> None:
        while self._pending:
            self.step()


class EarlyWorld(World):
    """And the device, on which blocks are restored as they come."""

    def __init__(self, slots: int = 40, held: int = 0, share: float = 0.5) -> None:
        self.content: dict[int, bytes] = {}
        """Host slot: identity of the block whose bytes it holds."""
        super().__init__(slots, held, share)
        self.copies = Copies(self.content)
        self.allocator = Allocator(STOP)
        compute = ComputeStream(torch.device("cpu"))
        self.early = PrerestoredBlocks(self.allocator, cast(Restorer, self.copies), compute)

    def read(self, low: int, high: int) -> list[Promotion]:
        begun = super().read(low, high)
        self.content |= {promotion.slot: GARBAGE for promotion in begun}
        return begun

    def deliver(self, which: int = 0, outcome: Outcome = Outcome.OK) -> None:
        if self.io.moves:
            move = self.io.moves[which % len(self.io.moves)]
            if outcome is Outcome.OK:
                self.content[move.slot] = move.block_id
        super().deliver(which, outcome)

    def compute(self, tokens: int, *, saved: bool = True) -> None:
        self.head += tokens
        if saved:
            for node in keep(self.host, SPOKEN[: self.head // BLOCK_TOKENS * BLOCK_BYTES]):
                self.content[node.slot] = node.block_id

    def restore(self, limit: int = STOP) -> list[int]:
        """What a pass restores. Returns the blocks."""
        blocks = self.early.wanted(ME, self.meeting, self.head, limit)
        if blocks:
            slots = self.allocator.alloc(BLOCK_TOKENS * len(blocks))
            nodes = {n: self.meeting.detached_node(n) for n in blocks}
            self.early.restore(ME, nodes, slots)
        self.check_room()
        return blocks

    def others(self) -> None:
        """Another request gives what was computed to its own, and takes what room there is."""
        nodes = self.host.tree.match(self.prompt.up_to(self.head // BLOCK_TOKENS)).nodes
        if nodes:
            self.disk.coming.join(nodes[-1], 0.0)
        self.host.evict(self.host.num_slots, 0.0)
        taken = [self.host.stage(0.0) for _ in range(self.host.free_slots)]
        for slot in taken:
            assert slot is not None
            self.content[slot] = GARBAGE
            self.host.unstage(slot)

    def check_room(self) -> None:
        assert len(self.allocator.unused) + self.early.tokens == STOP, "each slot is in one hand"

    def meet(self) -> None:
        """Both ends meet: what was restored is what its place wants."""
        self.early.prove(ME)
        nodes = self.meeting.join(self.head, 0.0)
        if nodes is None:
            self.early.forget([ME])
            return
        there = self.early.hand_over(ME, nodes, self.head, STOP)
        for block, slots in there.items():
            held = [self.copies.device[slot] for slot in slots.tolist()]
            assert held == [(self.path.block_ids[block], row) for row in range(BLOCK_TOKENS)]
        if nodes:
            assert [node.block_id for node in nodes] == self.path.block_ids
            missing = missing_ranges(there, self.head, STOP)
            count = sum(end - begin for begin, end in missing)
            own = self.allocator.alloc(count)
            slots = interleave_slots(there, own, self.head, STOP)
            assert slots.unique().numel() == slots.numel() == STOP - self.head
            for begin, end in missing:
                assert set(slots[begin - self.head : end - self.head].tolist()) <= set(own.tolist())
            for block, its in there.items():
                first = block * BLOCK_TOKENS - self.head
                assert torch.equal(slots[first : first + BLOCK_TOKENS], its)
            self.allocator.free(own)
        self.early.give_back(there)

    def settle(self) -> None:
        self.early.release()
        self.copies.wait()
        super().settle()
        assert self.allocator.unused == self.allocator.all, "a device slot was lost"
        assert not self.copies.restored or max(self.copies.restored.values()) == 1


def test_a_block_is_restored_when_it_has_come_and_no_second_time() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    assert world.restore() == []
    world.deliver()
    world.deliver(1)
    assert world.restore() == [9, 11] and world.restore() == []
    world.deliver()
    assert world.restore() == [8]
    assert sorted(world.meeting.load.restored) == [8, 9, 11]
    assert world.meeting.history(0, 8, 0.0).restored == 3 * BLOCK_TOKENS
    world.settle()


@pytest.mark.parametrize(("limit", "blocks"), [(STOP, [10, 11]), (STOP - 1, [10])])
def test_a_block_whose_end_must_be_computed_is_not_restored_early(
    limit: int, blocks: list[int]
) -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(10)
    world.deliver()
    world.deliver()
    assert world.restore(limit) == blocks
    world.settle()


def test_where_it_does_not_pay_nothing_is_restored_early() -> None:
    world = EarlyWorld()
    world.meeting.as_they_come = False
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == []
    world.settle()


def test_what_is_computed_all_the_same_goes_back() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    while world.io.moves:
        world.deliver()
    world.restore()
    world.early.drop_before(ME, 10 * BLOCK_TOKENS)
    assert world.early.tokens == 2 * BLOCK_TOKENS and sorted(world.meeting.load.restored) == [
        10,
        11,
    ]
    world.check_room()
    world.settle()


def test_slots_that_others_need_go_back_and_stay_there() -> None:
    world = EarlyWorld()
    world.meeting.read_down_to(8)
    world.deliver()
    world.restore()
    assert world.early.release() == BLOCK_TOKENS and not world.meeting.load.restored
    world.deliver()
    assert world.restore() == []
    world.settle()


def test_a_block_that_left_its_place_before_it_was_copied_does_not_count() -> None:
    world = EarlyWorld(held=6)
    world.meeting.read_down_to(6)
    while world.io.moves:
        world.deliver()
    assert world.restore() == [6, 7, 8, 9, 10, 11]
    world.others()
    world.early.prove(ME)
    assert world.early.tokens == 0
    world.settle()


@pytest.mark.parametrize(("spare", "restored"), [(0, True), (-1, False)])
def test_the_rest_of_the_prompt_has_room_or_nothing_is_restored_early(
    spare: int, restored: bool
) -> None:
    """What the prompt still needs beside the early blocks is free, or just not."""
    world = EarlyWorld(held=1)
    world.meeting.read_down_to(8)
    world.deliver()
    assert world.restore() == [11]
    world.deliver()
    prompt = STOP + 20
    rest = prompt - world.head - world.early.tokens
    evictable = 100
    others = world.allocator.alloc(len(world.allocator.unused) - (rest - evictable + spare))
    room = world.allocator.available_size() + evictable
    tree = SimpleNamespace(page_size=1, allocate=world.allocator.alloc, room=room)
    nobody: Any = None
    ahead = RestoreAhead(world.early, nobody, nobody, nobody, nobody)
    req = SimpleNamespace(
        prefix_indices=range(world.head), full_untruncated_fill_ids=range(prompt),
        _compute_max_prefix_len=lambda length: length - 1, **{SERIAL: ME},
    )  # fmt: skip
    found = ahead.restore_what_came(cast(DeviceTree, tree), world.meeting, req, world.head)
    assert found == restored
    assert world.early.tokens == (2 * BLOCK_TOKENS if restored else 0)
    assert world.meeting.has_room == restored
    world.allocator.free(others)
    world.settle()


OUTCOMES = st.sampled_from([Outcome.OK] * 6 + [Outcome.DAMAGED, Outcome.IO_ERROR])


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_whatever_comes_when_what_is_there_is_right_and_no_slot_is_lost(
    data: st.DataObject,
) -> None:
    world = EarlyWorld(
        slots=data.draw(st.integers(len(WORD), 40), "slots"),
        held=data.draw(st.integers(0, 4), "held"),
        share=data.draw(st.floats(0, 1), "share"),
    )
    events: dict[str, Any] = {
        "read": lambda: world.deliver(data.draw(st.integers(0, 11)), data.draw(OUTCOMES)),
        "copy": world.copies.step,
        "others": world.others,
        "weights": lambda: world.io.moves or world.disk.coming.give_up_all(),
        "pressure": world.early.release,
    }
    often = ["read"] * 5 + ["copy"] * 3
    world.meeting.read_down_to(data.draw(st.integers(0, len(WORD) - 1), "low"))
    now = 0.0
    for _ in range(40):
        for _ in range(data.draw(st.integers(0, 5), "events")):
            events[data.draw(st.sampled_from([*often, *events]))]()
        if data.draw(st.integers(0, 19), "abort") == 0:
            break
        now += 0.7
        world.restore()
        step = world.meeting.next(world.head, data.draw(st.integers(0, 1), "decoding"), now)
        if step.action is Action.RESTORE:
            world.meet()
        if step.action in (Action.RESTORE, Action.OVER):
            break
        if step.action is Action.COMPUTE:
            world.early.drop_before(ME, world.head + step.tokens)
            try:
                world.compute(step.tokens, saved=data.draw(st.integers(0, 9)) > 0)
            except AssertionError:
                pass  # no room to save it
    world.settle()


def test_missing_ranges_begin_where_the_head_ends() -> None:
    slots = torch.arange(BLOCK_TOKENS)
    there = {2: slots, 4: slots}
    assert missing_ranges(there, 100, 5 * BLOCK_TOKENS + 1) == [
        (100, 2 * BLOCK_TOKENS), (3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS),
        (5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 1),
    ]  # fmt: skip
    others = torch.arange(1000, 1000 + 28 + BLOCK_TOKENS + 1)
    whole = interleave_slots(there, others, 100, 5 * BLOCK_TOKENS + 1)
    assert torch.equal(whole[:28], others[:28]) and torch.equal(
        whole[28 : 28 + BLOCK_TOKENS], slots
    )
    assert len(whole) == 5 * BLOCK_TOKENS + 1 - 100 and whole[-1] == others[-1]
