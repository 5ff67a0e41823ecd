"""A block keeps its slot while rows are still on their way to it, even when others need room."""

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


def compute(tiers: Tiers, start: int, rows: int) -> None:
    """Request r computes rows behind its first `start` tokens."""
    if not start:
        tiers.capture.open("r", Prefix(None, b""))
    taps = torch.zeros((2, rows, HIDDEN_BYTES), dtype=torch.uint8)
    tiers.capture.take([Segment("r", start, 0, rows)], taps)


def test_a_block_that_is_not_ready_does_not_make_room() -> None:
    tiers, _, executor = build(PLAN, slots=2, device_slots=100)
    compute(tiers, 0, FEW)
    tiers.capture.commit("r", Prefix(None, TOKENS), torch.arange(FEW), final=True)
    assert tiers.host.published_blocks == 1
    assert not tiers.host.tree.match(Prefix(None, TOKENS)).ready.tokens
    other = tiers.host.stage(0.0)
    assert other is not None and tiers.host.stage(0.0) is None  # e.g. for a read from disk
    executor.step()
    tiers.poll()
    assert tiers.host.tree.match(Prefix(None, TOKENS)).ready.tokens == FEW
    assert tiers.host.stage(0.0) is not None
    assert tiers.host.published_blocks == 0


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
