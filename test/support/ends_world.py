"""A waiting queue over paths that need ends, with blocks and end parts below host memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS, EndLayout, StateLayers, WindowLayers
from sglang_hc.policy.eviction import EvictionPolicy, make_policy
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.writing import WriteAdmission
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.queue_view import QueueRules, QueueView
from sglang_hc.queue.requests import QueuedPrompt
from sglang_hc.store.block_io import BlockIo
from sglang_hc.store.ends_below import EndsBelow
from sglang_hc.store.host_pool import EndPool
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import End, EndPart, Ends
from sglang_hc.tree.identity import Prefix
from support.clock import Clock
from support.disk_store import data_of
from support.fake_io import FakeIo
from support.host import host_tier, keep, path_of, tokens_of
from support.rates import UNKNOWN_COSTS

WINDOW = EndLayout(window=WindowLayers((1, 3), 2 * BLOCK_TOKENS, (8, 8)))
STATE = EndLayout(state=StateLayers((0, 2), (24, 40), ("float32", "float32")))


class EndsWorld:
    """Requests are named by numbers, paths by words, each letter of which is a block.

    The bytes of a part follow from the identity of its block, so it can be told whose they are.
    """

    def __init__(
        self,
        layout: EndLayout = WINDOW,
        slots: int = 32,
        end_slots: int = 12,
        costs: RestorePlanner = UNKNOWN_COSTS,
        blocks_io: BlockIo | None = None,
        parts_io: Callable[[EndPool], BlockIo] | None = None,
        admission: WriteAdmission | None = None,
    ) -> None:
        """blocks_io, parts_io: what is below; None for fakes in memory. admission: what is written
        there; None for everything."""
        self.clock = Clock(time.monotonic())
        self.window = LookAhead()
        self.host = host_tier(slots, make_policy("queue", self.window))
        policy: EvictionPolicy[End] = make_policy("queue", self.window)
        self.ends = Ends(layout, end_slots, self.host, policy, self.window.next_use)
        self.pool = EndPool(layout, end_slots)
        self.blocks = FakeIo(clock=self.clock)
        self.parts = FakeIo(self.pool, clock=self.clock, writes_wait=True)
        below = blocks_io or self.blocks
        self.disk = LowerTier(below, self.host, self.clock, admission=admission)
        below, kept = (
            self.parts if parts_io is None else parts_io(self.pool),
            self.disk.keeps_end_of,
        )
        self.below = EndsBelow(below, self.ends, self.host, self.disk.coming, self.clock, kept)
        self.disk.ends = self.below
        self.queue = QueueView(self.host, self.disk, self.window, QueueRules(), costs)
        self.waiting: list[int] = []
        self._numbers = itertools.count(1)

    # -- what is computed ------------------------------------------------------------------------

    def keep(self, word: str) -> list[BlockNode]:
        """The path of a word is computed, and its blocks are written below."""
        for node in keep(self.host, tokens_of(word)):
            self.disk.write_through(node)
        return self.path(word)

    def path(self, word: str) -> list[BlockNode]:
        return list(self.host.tree.match(Prefix(None, tokens_of(word))).ready.nodes)

    def end(self, *words: str) -> None:
        """These paths are computed, and can be continued behind their last blocks."""
        for word in words:
            for part in self.ends.begin(self.keep(word)) or ():
                self.fill(part)
                self.ends.written(part)

    def fill(self, part: EndPart) -> None:
        self.pool.slot(part.slot)[:] = self.bytes_of(part.node)

    def bytes_of(self, node: BlockNode) -> np.ndarray:
        return data_of(node.block_id, self.pool.layout.slot_bytes)

    def forget_host(self) -> None:
        """Everything is below, and host memory is empty."""
        self.settle()
        self.host.clear()

    # -- what waits ------------------------------------------------------------------------------

    def ask(self, word: str) -> int:
        """A request is queued, the prompt of which is this word and a token."""
        request = next(self._numbers)
        prompt = Prefix(None, tokens_of(word) + bytes(4))
        self.queue.arrived(request, lambda: QueuedPrompt(prompt, lambda: 0))
        self.waiting.append(request)
        self.look()
        return request

    def look(self) -> None:
        self.queue.on_schedule_step(tuple(self.waiting))

    def ready(self, request: int) -> bool:
        return self.queue.ready(request)

    def serve(self, request: int, word: str) -> int:
        """A request waits until it is ready. Returns up to which block it goes on."""
        for _ in range(100):
            if self.ready(request):
                break
            self.blocks.step()
            self.parts.step()
            self.poll()
            self.look()
        else:
            raise AssertionError("it waits for ever")
        self.waiting.remove(request)
        self.look()
        return self.deepest(word)

    def poll(self) -> None:
        self.disk.poll()

    def settle(self) -> None:
        """Whatever is under way ends well."""
        while self.blocks.moves or self.parts.moves:
            self.blocks.end_all()
            self.parts.end_all()
            self.poll()
        self.poll()

    # -- what must be true -----------------------------------------------------------------------

    def deepest(self, word: str) -> int:
        """Blocks of a path up to its last end, whose parts have the right bytes."""
        path = self.path(word)
        count = self.ends.deepest(path)
        for part in self.ends.parts(path, count):
            assert np.array_equal(self.pool.slot(part.slot), self.bytes_of(part.node))
        self.check()
        return count

    def check(self) -> None:
        self.host.check_integrity()
        self.ends.check_integrity()

    def part_id(self, word: str) -> bytes:
        """Identity of the part of a word's last block."""
        return self.below.part_id(path_of(word).block_ids[-1])
