"""States of recurrent layers on their way to host memory and back, with copies that happen as late
as they may: what comes back is what the path left, and nobody else's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.capture.direct import DeviceRing, DirectRows
from sglang_hc.capture.states import StateCapture
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, EndLayout, LayerPlan, StateLayers, StateShape
from sglang_hc.policy.ends import Stay
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.restore.states import StateRestorer
from sglang_hc.store.host_pool import EndPool, HostPool
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix
from support.copy_streams import LateCopyStream
from support.examples import examples
from support.host import host_tier, keep, tokens_of
from support.tiers import StepExecutor

LAYOUT = EndLayout(state=StateLayers((0, 1, 3), (24, 40), ("bfloat16", "float32")))
BLOCKS = BlockLayout(LayerPlan(0, 0, 1), StateShape(1, 0, (8, 8), "float32"), ends=LAYOUT)
SLOTS = 6


class Device:
    """A pool of states, each of whose slots is a number everywhere."""

    def __init__(self) -> None:
        parts = LAYOUT.state.parts
        self.parts = [torch.zeros((3, SLOTS, size), dtype=torch.uint8) for size in parts]

    def fill(self, slot: int, value: int) -> None:
        for part in self.parts:
            part[:, slot] = value

    def value(self, slot: int) -> int:
        (value,) = {int(byte) for part in self.parts for byte in part[:, slot].unique()}
        return value

    def write(self, rows: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        for part, row in zip(self.parts, rows, strict=True):
            part[:, slot] = row


class World:
    """ring: states pass through device memory for two of them; else copies happen at once."""

    def __init__(self, ring: bool, ends: int) -> None:
        self.device, self.copies = Device(), LateCopyStream()
        self.host = host_tier(64)
        pool = EndPool(LAYOUT, ends)
        self.ends = Ends(LAYOUT, ends, self.host, LruPolicy())
        self.scatters = ScatterQueue(StepExecutor(HostPool(BLOCKS, 1), []), self.host)
        size = 2 * LAYOUT.slot_bytes
        memory = DeviceRing(size, torch.device("cpu")) if ring else None
        rows = DirectRows(pool.state, self.copies, self.scatters, memory)
        self.capture = StateCapture(self.host, self.ends, rows, self.scatters)
        self.counts: Counter[str] = Counter()
        self.restorer = StateRestorer(self.ends, pool.state, self.device, self.copies, self.counts)
        self.left: dict[str, int] = {}

    def leave(self, word: str, value: int) -> None:
        """The path of a word leaves a state, whose slot somebody else has at once."""
        keep(self.host, tokens_of(word))
        path = Prefix(None, tokens_of(word))
        if not self.capture.wants(path, Stay.REPLY):
            return
        self.device.fill(1, value)

        def read(targets: list[torch.Tensor], at: int, first: int, count: int) -> None:
            for part, target in zip(self.device.parts, targets, strict=True):
                target[:, at : at + count] = part[:, 1:2]

        self.capture.keep(path, read, Stay.REPLY)
        self.device.fill(1, 255)
        self.left[word] = value

    def go_on(self, word: str) -> None:
        """A request with this path goes on where it can."""
        path = self.host.tree.match(Prefix(None, tokens_of(word))).nodes
        count = self.ends.deepest(path)
        if count:
            (part,) = self.ends.parts(path, count)
            self.restorer.restore(part, torch.tensor([2]))
            assert self.device.value(2) == self.left[word[:count]]

    def check(self) -> None:
        self.host.check_integrity()
        self.ends.check_integrity()


WORDS = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.booleans(),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["leave", "go", "copy", "forget"]), WORDS), max_size=25),
    st.integers(0, 99),
)
def test_a_state_that_comes_back_is_the_one_that_was_left(
    ring: bool, ends: int, steps: list[tuple[str, str]], seed: int
) -> None:
    world, rng = World(ring, ends), random.Random(seed)
    for number, (what, word) in enumerate(steps):
        if what == "leave":
            world.leave(word, number + 1)
        elif what == "go":
            world.go_on(word)
        elif what == "copy":
            world.copies.advance_to(min(world.copies.enqueued, world.copies.performed + 3))
            world.scatters.poll()
            world.restorer.poll()
        else:
            world.host.evict(rng.randint(1, 3), 0.0)
        world.check()
    world.scatters.drain()
    world.restorer.clear()
    world.check()
    for word in world.left:
        world.go_on(word)
    world.restorer.poll()
    assert all(node.end is None or not node.end.pins for node in world.host.tree.nodes())


def test_what_cannot_be_kept_is_counted() -> None:
    world = World(False, 1)
    inside = Prefix(None, tokens_of("ab")[: (BLOCK_TOKENS + 9) * TOKEN_BYTES])
    assert not world.capture.wants(inside, Stay.REPLY)
    assert not world.capture.wants(Prefix(None, tokens_of("b")), Stay.REPLY)
    assert not world.capture.wants(Prefix(None, b""), Stay.REPLY)
    world.leave("a", 1)
    world.ends.pin(world.ends.parts(world.host.tree.match(Prefix(None, tokens_of("a"))).nodes, 1))
    world.leave("b", 2)
    assert world.capture.counters == {
        "ends_inside_blocks": 2,
        "ends_without_blocks": 1,
        "kept_ends": 1,
        "ends_without_room": 1,
    }


@pytest.mark.parametrize("ring", [False, True])
def test_a_state_that_cannot_be_read_leaves_no_end(ring: bool) -> None:
    world, path = World(ring, 1), Prefix(None, tokens_of("a"))
    keep(world.host, path.tokens)
    assert world.capture.wants(path, Stay.REPLY)

    def read(*_: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        world.capture.keep(path, read, Stay.REPLY)
    world.scatters.drain()
    world.check()
    assert not len(world.ends) and world.ends.free_slots == 1
    world.leave("a", 1)
    world.scatters.drain()
    world.go_on("a")
