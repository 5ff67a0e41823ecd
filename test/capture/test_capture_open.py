"""Opening a request in the middle of a block of a full host tier."""

from __future__ import annotations

import torch

from sglang_hc.capture.capture import Segment
from sglang_hc.forms import LayerPlan
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.tiers import HIDDEN_BYTES, build

PLAN = LayerPlan(0, 2, 0)


def serve(tiers, rid: str, tokens: list[int], start: int, value: int) -> None:
    """A request computes its tokens from `start` on, all hidden bytes `value`, and is kept."""
    tiers.capture.open(rid, Prefix(None, pack_tokens(tokens[:start])))
    rows = len(tokens) - start
    taps = torch.full((PLAN.num_layers, rows, HIDDEN_BYTES), value, dtype=torch.uint8)
    tiers.capture.take([Segment(rid, start, 0, rows)], taps)
    slots = torch.arange(len(tokens))
    tiers.capture.commit(rid, Prefix(None, pack_tokens(tokens)), slots, final=True)
    tiers.drain()


def test_the_block_that_is_continued_does_not_make_room_for_its_copy() -> None:
    tiers, _, _ = build(PLAN, slots=2, device_slots=200)
    serve(tiers, "old", [1] * 40, 0, 7)  # least recently used
    serve(tiers, "new", [2] * 40, 0, 9)
    assert tiers.host.free_slots == 0
    # The device still holds "old"; a request goes on in the middle of its block.
    serve(tiers, "on", [1] * 40 + [3] * 10, 40, 5)
    nodes, usable = tiers.host.tree.match(Prefix(None, pack_tokens([1] * 40 + [3] * 10))).ready
    assert usable == 50
    hidden = torch.from_numpy(tiers.restorer.path.pool.hidden[nodes[0].slot])
    assert (hidden[:, :40] == 7).all() and (hidden[:, 40:50] == 5).all()
    tiers.check_integrity()
