"""Blocks of a meeting that are restored as they come, on a device whose copies run when a test says
so."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import cast

import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.requests import Serial
from sglang_hc.restore.path import Restoration
from sglang_hc.restore.prerestored import (
    PrerestoredBlocks,
    interleave_slots,
    missing_ranges,
)
from sglang_hc.restore.restorer import Restorer
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import BLOCK_BYTES
from sglang_hc.tree.promotions import Promotion
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
        self.fail = False
        """The next restoration ends with an error."""

    def restore_early(self, restorations: Sequence[Restoration]) -> Copies:
        if self.fail:
            self.fail = False
            raise OSError("planted")
        for restoration in restorations:
            self._pending.append(restoration)
            blocks = range(restoration.start // BLOCK_TOKENS, restoration.stop // BLOCK_TOKENS)
            self.restored.update(blocks)
        return self

    def keep(self, nodes: Sequence[BlockNode]) -> None:
        """Its copies are made while the blocks are pinned."""
        self.wait()

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
        for node in self.host.tree.match(self.prompt).nodes:
            self.content[node.slot] = node.block_id
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
