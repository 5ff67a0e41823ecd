"""Rows of layers with sliding windows, saved to end parts, come back each to its own slot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.capture.direct import DeviceRing, DirectRows
from sglang_hc.capture.ends import EndRows, EndSaver, places_of
from sglang_hc.device.copy_stream import HostCopyStream
from sglang_hc.forms import BLOCK_TOKENS, DraftLayers, EndLayout, LayerPlan, WindowLayers
from sglang_hc.policy.ends import Place, Stay
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.restore.path import EndPath, Restoration, RestorePath, WindowRows
from sglang_hc.restore.restore_pass import RestorePass
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.host_pool import EndPool
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.identity import Prefix
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.host import keep, tokens_of
from support.tiers import PARTS, ToyPool, build

FULL, WINDOWS = 2, 3
LAYOUT = EndLayout(WindowLayers((0, 2, 3), 95, PARTS))
"""Of a model of five layers, of which 1 and 4 have full attention."""
NUMBERS = {0: 2, 1: 0, 2: 3, 3: 4, 4: 1}
"""In a restore pass; layers of a draft model come between both kinds."""
LENGTH = 5 * BLOCK_TOKENS


class World:
    """A path of five blocks, the rows of which are in a pool of the device."""

    def __init__(self, ring: int, drafts: int = 0) -> None:
        """drafts: layers of a draft model."""
        self.tiers: Tiers
        self.drafts = drafts
        self.copies = LateCopyStream()
        self.tiers, self.full, _ = build(
            *(LayerPlan(0, 0, FULL), 8, 600), copy_stream=self.copies, ends=LAYOUT,
            draft=DraftLayers(drafts),
        )  # fmt: skip
        host = self.tiers.host
        keep(host, tokens_of("abcde"))
        self.path = list(host.tree.match(Prefix(None, tokens_of("abcde"))).nodes)
        self.ends = Ends(LAYOUT, 6, host, LruPolicy())
        self.pool = EndPool(LAYOUT, 6)
        self.device = ToyPool(900, WINDOWS)
        self.slots = torch.randperm(899)[:LENGTH] + 1
        for layer in range(WINDOWS):
            for part in self.device.kv[layer]:
                part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
        own = DeviceRing(ring, torch.device("cpu")) if ring else None
        scatters = self.tiers.capture.scatters
        rows = DirectRows(self.pool.window, HostCopyStream(), scatters, own)
        self.saver, self.counters = EndSaver(self.ends, rows, self.device, scatters), Counter[str]()

    def save(self, blocks: int, first: int) -> None:
        """An end, of which the rows from token `first` on are there."""
        stop = blocks * BLOCK_TOKENS
        rows = EndRows(first, self.slots[first:stop], stop)
        self.saver.save(self.path[:blocks], rows, [Place(blocks, Stay.PROMPT)], self.counters)
        self.tiers.drain()

    def restore(self, blocks: int, ranges: list[tuple[int, int]], target: torch.Tensor) -> None:
        """Into the slots `target` of both pools, which have other rows. The model asks for its
        layers one by one."""
        parts = self.ends.parts(self.path, blocks)
        window = WindowRows(parts, blocks - len(parts), ranges, target)
        stop = blocks * BLOCK_TOKENS
        restored = Restoration(
            tuple(self.path[:blocks]), 0, stop, torch.arange(stop), window=window
        )
        own, copies = self.tiers.restorer.path, self.copies
        ring = StagingRing(2, 64 * 2 * sum(PARTS), torch.device("cpu"), copies)
        numbers = {n: m if m < FULL else m + self.drafts for n, m in NUMBERS.items()}
        ends = EndPath(self.pool, self.device, numbers)
        path = RestorePath(own.pool, self.full, ring, ends=ends)
        running = RestorePass(path, [restored])
        for layer in range(5):
            running.wait(layer)
        running.finish()


@pytest.mark.parametrize("ring", [0, 40_000])
@given(
    st.integers(1, 5), st.lists(st.integers(0, 127), min_size=2, max_size=4, unique=True),
    st.integers(0, 2),
)  # fmt: skip
@settings(max_examples=examples(20), deadline=None)
def test_each_row_comes_back_to_its_slot(
    ring: int, blocks: int, cuts: list[int], drafts: int
) -> None:
    world = World(ring, drafts)
    stop = blocks * BLOCK_TOKENS
    low = max(0, stop - 2 * BLOCK_TOKENS)
    world.save(blocks, low)
    assert world.ends.deepest(world.path[:blocks]) == blocks
    edges = sorted({min(low + cut, stop) for cut in cuts} | {stop})
    ranges = list(zip(edges[::2], edges[1::2], strict=False)) or [(low, stop)]
    places = torch.cat([torch.arange(*one) for one in ranges])
    wanted = [[part[world.slots[places]] for part in layer] for layer in world.device.kv]
    target = torch.randperm(899)[: len(places)] + 1
    for layer in world.device.kv:
        for part in layer:
            part.fill_(0)
    world.restore(blocks, ranges, target)
    for layer, rows in zip(world.device.kv, wanted, strict=True):
        for part, want in zip(layer, rows, strict=True):
            assert torch.equal(part[target], want)
            assert not part[[slot for slot in range(900) if slot not in set(target.tolist())]].any()
    world.ends.check_integrity()


def test_an_end_whose_rows_have_left_is_no_end() -> None:
    world = World(0)
    world.save(4, 2 * BLOCK_TOKENS + 1)
    assert world.ends.deepest(world.path) == 0 and world.counters["ends_without_rows"] == 1
    world.save(4, 2 * BLOCK_TOKENS)
    world.save(5, 4 * BLOCK_TOKENS)  # the part of the block before is there
    assert world.ends.deepest(world.path) == 5 and world.counters["kept_ends"] == 2


@pytest.mark.parametrize("ring", [0, 40_000])
def test_an_end_that_could_not_be_saved_holds_no_slots(
    ring: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And can be saved later."""
    world, gathers, gather = World(ring), iter([False, True]), ToyPool.gather

    def failing(self: ToyPool, *args: Any) -> None:
        if next(gathers, False):
            raise RuntimeError("planted")
        gather(self, *args)

    monkeypatch.setattr(ToyPool, "gather", failing)
    with pytest.raises(RuntimeError, match="planted"):
        world.save(4, 2 * BLOCK_TOKENS)
    world.tiers.drain()
    assert world.ends.deepest(world.path) == 0 and world.ends.free_slots == world.ends.num_slots
    world.save(4, 2 * BLOCK_TOKENS)
    assert world.ends.deepest(world.path) == 4


def test_ends_lie_behind_prompts_and_replies_and_where_a_prompt_leaves_a_known_one() -> None:
    def where(prompt: int, kept: int, shared: int, final: bool) -> dict[int, Stay]:
        rows = EndRows(0, torch.empty(0), prompt)
        return {place.blocks: place.stay for place in places_of(rows, kept, shared, final)}

    assert where(300, 300, 0, final=False) == {4: Stay.PROMPT}
    assert where(300, 256, 0, final=False) == {4: Stay.PROMPT}  # in pages of 64 tokens
    assert where(300, 300, 130, final=False) == {2: Stay.SHARED, 4: Stay.PROMPT}
    assert where(300, 128, 0, final=False) == {}  # a chunk of it
    assert where(300, 128, 100, final=False) == {1: Stay.SHARED}
    assert where(300, 400, 0, final=True) == {6: Stay.REPLY}
    assert where(300, 310, 0, final=True) == {4: Stay.PROMPT}
