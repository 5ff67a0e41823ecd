"""Of a verify pass only accepted rows reach a block, however many there are and whenever that is
known."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.capture.capture import Segment
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.capture.verified import PASSES, Held, VerifiedRows
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.examples import examples
from support.tiers import HIDDEN_BYTES, build

LAYERS = 2
REJECTED = 255
CPU = torch.device("cpu")


def state(request: int, position: int) -> torch.Tensor:
    """(layers, hidden bytes), never REJECTED."""
    places = torch.arange(LAYERS * HIDDEN_BYTES).view(LAYERS, HIDDEN_BYTES)
    return ((67 * request + 7 * position + 31 * places) % REJECTED).to(torch.uint8)


class Verify(NamedTuple):
    """A request's part of a verify pass: the rows that are accepted, in the order of positions."""

    path: tuple[int, ...]


@st.composite
def verifies(draw: st.DrawFn, rows: int) -> Verify:
    """Row 0 is always accepted; behind it any others, in the order of the tree's rows."""
    more = draw(st.sets(st.integers(1, rows - 1))) if rows > 1 else set()
    return Verify((0, *sorted(more)))


class Story(NamedTuple):
    rows: int
    length: int
    prompts: list[int]
    passes: list[list[Verify]]
    late: list[bool]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Requests with prompts, verify passes over all of them, and after which passes the host has
    heard of the result when the next one is launched."""
    rows = draw(st.integers(1, 8))
    prompts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    passes = draw(
        st.lists(
            st.lists(verifies(rows), min_size=len(prompts), max_size=len(prompts)), max_size=20
        )
    )
    late = [draw(st.booleans()) for _ in passes]
    return Story(rows, draw(st.integers(rows, 2 * rows)), prompts, passes, late)


@given(stories())
@settings(max_examples=examples(100))
def test_rejected_rows_are_in_no_block(story: Story) -> None:
    tiers, _, executor = build(LayerPlan(0, LAYERS, 0), slots=60, device_slots=10)
    requests = range(len(story.prompts))
    taps = TapBuffer(LAYERS, 8 * 3, HIDDEN_BYTES, torch.uint8, CPU)
    verified = VerifiedRows(taps, 16 * 3)
    committed = list(story.prompts)
    for request, prompt in enumerate(story.prompts):
        tiers.capture.open(str(request), Prefix(None, b""))
        rows = torch.stack([state(request, p) for p in range(prompt)], dim=1)
        tiers.capture.take([Segment(str(request), 0, 0, prompt)], rows)
    waiting: list[tuple[list[Verify], Held | None]] = []

    def hear() -> None:
        """The host takes in the oldest result."""
        parts, held = waiting.pop(0)
        assert held is not None
        segments = []
        for request, part in enumerate(parts):
            at, kept = committed[request], len(part.path)
            segments.append(Segment(str(request), at, request * held.width, kept))
            committed[request] += kept
        tiers.capture.take(segments, held.states)
        tiers.capture.flush()
        while executor.waiting:
            executor.step()
        tiers.capture.scatters.poll()

    launched = list(story.prompts)
    for parts, late in zip(story.passes, story.late, strict=True):
        taps.states.fill_(REJECTED)
        path = torch.full((len(requests), story.length), -1, dtype=torch.int32)
        for request, part in enumerate(parts):
            for depth, row in enumerate(part.path):
                taps.states[:, request * story.rows + row] = state(
                    request, launched[request] + depth
                )
                path[request, depth] = request * story.rows + row
            launched[request] += len(part.path)
        verified.hold(path, story.rows)
        taps.states.fill_(REJECTED)  # the next pass overwrites the taps before the host knows
        waiting.append((parts, verified.take()))
        assert verified.take() is None
        while len(waiting) > (PASSES - 1 if late else 0):
            hear()
    while waiting:
        hear()
    for request in requests:
        tokens = pack_tokens([1000 * request + p for p in range(committed[request])])
        slots = torch.zeros(committed[request], dtype=torch.int64)
        tiers.capture.commit(str(request), Prefix(None, tokens), slots, final=True)
        tiers.drain()
        nodes, usable = tiers.host.tree.match(Prefix(None, tokens)).ready
        assert usable == committed[request]
        for block, node in enumerate(nodes):
            low = block * BLOCK_TOKENS
            high = min(low + BLOCK_TOKENS, usable)
            rows = torch.stack([state(request, p) for p in range(low, high)], dim=1)
            saved = tiers.restorer.path.pool.hidden[node.slot][:, : high - low]
            assert torch.equal(torch.from_numpy(saved), rows)
    tiers.check_integrity()
    assert set(tiers.capture.counters) <= {"kept_tokens"}
    assert tiers.host.staged_slots == 0


@pytest.mark.parametrize(("tapped", "held", "kept"), [(12, 9, 3), (11, 9, 2), (12, 8, 2)])
def test_requests_without_room_are_left_out_and_counted(tapped: int, held: int, kept: int) -> None:
    """Three requests of four rows each, of which three are accepted."""
    tiers, _, _ = build(LayerPlan(0, LAYERS, 0), slots=60, device_slots=10)
    taps = TapBuffer(LAYERS, tapped, HIDDEN_BYTES, torch.uint8, CPU)
    verified = VerifiedRows(taps, held)
    for request in range(3):
        tiers.capture.open(str(request), Prefix(None, b""))
    verified.hold(torch.tensor([[0, 1, 2], [4, 5, 6], [8, 9, 10]], dtype=torch.int32), 4)
    left = verified.take()
    assert left is not None and left.states.shape == (LAYERS, 3 * kept, HIDDEN_BYTES)
    tiers.capture.take([Segment(str(r), 0, r * left.width, 3) for r in range(3)], left.states)
    assert tiers.capture.counters["tap_overflow"] == 3 - kept
