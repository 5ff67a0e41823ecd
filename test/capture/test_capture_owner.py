"""A block keeps its slot while rows are on their way to it or from it, whoever needs room."""

from __future__ import annotations

import torch

from sglang_hc.capture.capture import Segment
from sglang_hc.capture.saving import STRAIGHT_ROWS
from sglang_hc.forms import LayerPlan
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.tiers import HIDDEN_BYTES, build

PLAN = LayerPlan(0, 2, 0)
FEW = STRAIGHT_ROWS - 1
"""Rows that wait in a snapshot."""
TOKENS = pack_tokens([1] * FEW)


def compute(tiers: Tiers, start: int, rows: int, rid: str = "r", value: int = 0) -> None:
    """A request computes rows behind its first `start` tokens, all hidden bytes `value`."""
    if not tiers.capture.is_open(rid):
        tiers.capture.open(rid, Prefix(None, pack_tokens([1] * start)))
    taps = torch.full((2, rows, HIDDEN_BYTES), value, dtype=torch.uint8)
    tiers.capture.take([Segment(rid, start, 0, rows)], taps)


def test_a_block_that_left_while_it_was_scattered_frees_its_slot_afterwards() -> None:
    tiers, _, executor = build(PLAN, slots=3, device_slots=100)
    compute(tiers, 0, FEW)
    tiers.capture.commit("r", Prefix(None, TOKENS), torch.arange(FEW), final=False)
    compute(tiers, FEW, 10)
    longer = pack_tokens([1] * (FEW + 10))
    # It takes the tail's place.
    tiers.capture.commit("r", Prefix(None, longer), torch.arange(FEW + 10), final=True)
    assert tiers.host.published_blocks == 1 and tiers.host.free_slots == 1
    while not tiers.host.tree.match(Prefix(None, longer)).ready.tokens:
        executor.step()
        tiers.poll()
    assert tiers.host.free_slots == 2
    tiers.check_integrity()


def test_the_block_that_is_continued_does_not_make_room_for_its_copy() -> None:
    tiers, _, _ = build(PLAN, slots=2, device_slots=200)

    def serve(rid: str, tokens: list[int], start: int, value: int) -> None:
        compute(tiers, start, len(tokens) - start, rid, value)
        prefix = Prefix(None, pack_tokens(tokens))
        tiers.capture.commit(rid, prefix, torch.arange(len(tokens)), final=True)
        tiers.drain()

    serve("old", [1] * 40, 0, 7)  # least recently used
    serve("new", [2] * 40, 0, 9)
    assert tiers.host.free_slots == 0
    # The device still holds "old"; a request goes on in the middle of its block.
    longer = [1] * 40 + [3] * 10
    serve("on", longer, 40, 5)
    nodes, usable = tiers.host.tree.match(Prefix(None, pack_tokens(longer))).ready
    assert usable == 50
    hidden = torch.from_numpy(tiers.restorer.path.pool.hidden[nodes[0].slot])
    assert (hidden[:, :40] == 7).all() and (hidden[:, 40:50] == 5).all()
    tiers.check_integrity()
