"""A draft model's layers come back with the model's own, with their rows at the right positions.

A row of an EAGLE draft model depends on the token behind its position too. Two sequences that part
there share the model's row and not the draft's.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.capture.capture import Segment
from sglang_hc.forms import BLOCK_TOKENS, DraftLayers, LayerPlan
from sglang_hc.restore.path import Restoration
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.tiers import HIDDEN_BYTES, PARTS, ToyPool, build, project

SLOTS = 2000
UNKNOWN = 999
"""The token behind a sequence's end, when its last row was computed."""


def row(layer: int, tokens: Sequence[int], width: int) -> torch.Tensor:
    """A row that depends on all of `tokens`."""
    seed = zlib.crc32(repr((layer, list(tokens))).encode())
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (width,), generator=generator).to(torch.uint8)


def rows_of(layer: int, tokens: Sequence[int], lag: int, width: int) -> torch.Tensor:
    """(tokens, width): the row of each position, which depends on `lag` tokens behind it."""
    known = [*tokens, UNKNOWN]
    return torch.stack([row(layer, known[: p + 1 + lag], width) for p in range(len(tokens))])


def write(
    pool: ToyPool, plan: LayerPlan, tokens: Sequence[int], draft: DraftLayers, at: int
) -> None:
    """What a request that computed all of `tokens` leaves in slots from `at` on."""
    span = slice(at, at + len(tokens))
    for layer in range(plan.num_layers + draft.count):
        lag = draft.lag if layer >= plan.num_layers else 0
        if layer in plan.hidden_layers:
            states = rows_of(layer, tokens, 0, HIDDEN_BYTES)
            found = project(layer, states, torch.arange(len(tokens)))
        else:
            found = [rows_of(layer + 100 * part, tokens, lag, w) for part, w in enumerate(PARTS)]
        for target, rows in zip(pool.kv[layer], found, strict=True):
            target[span] = rows


@st.composite
def sequences(draw: st.DrawFn) -> list[list[int]]:
    """Sequences that share prefixes, and part in the middle and at the ends of blocks."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(1, 4))):
        before = draw(st.sampled_from(found)) if found else []
        keep = draw(st.sampled_from([0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100]))
        more = draw(st.integers(1, 90))
        start = draw(st.integers(0, 1000))
        found.append([*before[:keep], *range(start, start + more)])
    return found


@pytest.mark.parametrize(
    "plan", [LayerPlan(0, 0, 1), LayerPlan(0, 1, 0), LayerPlan(0, 1, 1)], ids=str
)
@pytest.mark.parametrize("lag", [0, 1])
@given(told=sequences(), data=st.data())
@settings(max_examples=examples(25))
def test_what_comes_back_is_what_was_there(
    plan: LayerPlan, lag: int, told: list[list[int]], data: st.DataObject
) -> None:
    draft = DraftLayers(2, lag)
    tiers, pool, _ = build(plan, slots=40, device_slots=SLOTS, draft=draft)
    at = 0
    for index, tokens in enumerate(told):
        write(pool, plan, tokens, draft, at)
        if plan.hidden:
            tiers.capture.open(str(index), Prefix(None, b""))
            states = rows_of(0, tokens, 0, HIDDEN_BYTES)[None]
            tiers.capture.take([Segment(str(index), 0, 0, len(tokens))], states)
        slots = torch.arange(at, at + len(tokens))
        tiers.capture.commit(str(index), Prefix(None, pack_tokens(tokens)), slots, final=True)
        tiers.drain()
        at += len(tokens)
    tokens = data.draw(st.sampled_from(told))
    nodes, usable = tiers.host.tree.match(Prefix(None, pack_tokens(tokens))).ready
    assert usable == len(tokens)
    stop = usable - lag
    start = data.draw(st.integers(0, max(0, stop - 1)))
    if start == stop:
        return
    before = torch.arange(at, at + start)
    slots = torch.arange(at + start, at + stop)
    tiers.restorer.queue(
        Restoration(nodes, start, stop, slots, plan.recompute, before), release=lambda: None
    )
    tiers.restorer.run_now()
    wanted = ToyPool(len(tokens), plan.num_layers + draft.count)
    write(wanted, plan, tokens, draft, 0)
    for layer in (*plan.hidden_layers, *plan.kv_layers, plan.num_layers, plan.num_layers + 1):
        for part, rows in enumerate(pool.kv[layer]):
            assert torch.equal(rows[slots], wanted.kv[layer][part][start:stop])
    tiers.check_integrity()
