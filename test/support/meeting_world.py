"""One history on a disk that answers when a test says so, and the meeting of its request."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.meeting import History, Split
from sglang_hc.queue.meeting import Meeting, TailReads
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.identity import BLOCK_BYTES, BlockPath, Prefix
from sglang_hc.tree.promotions import Promotion
from support.fake_io import FakeIo
from support.host import host_tier, identities, keep, tokens_of

WORD = "abcdefghijkl"
SPOKEN = tokens_of(WORD + "q")
BLOCK_SECONDS = 3.0
"""What the source is said to take for a block."""


class World:
    """A history of as many blocks as letters, `held` of them in host memory, and costs that always
    say to compute `share` of what is coming."""

    def __init__(self, slots: int = 40, held: int = 0, share: float = 0.5, beyond: int = 0) -> None:
        """beyond: so many first blocks are in a remote store."""
        self.host = host_tier(slots)
        self.io = FakeIo()
        self.now = 0.0
        self.disk = LowerTier(
            self.io,
            self.host,
            lambda: self.now,
            block_seconds=lambda tier: BLOCK_SECONDS,
        )
        self.prompt = Prefix(None, SPOKEN)
        self.path = BlockPath(self.prompt, identities(tokens_of(WORD)))
        self.io.hold(self.path.block_ids)
        self.ends: Counter[bytes] = Counter()
        self.disk.coming.subscribe(self.ends.update, lambda lost: self.ends.update((lost,)))
        self.share = share
        self.asked: list[History] = []
        if held:
            keep(self.host, tokens_of(WORD[:held]))
        self.head = held * BLOCK_TOKENS
        self.io.far |= set(self.path.block_ids[:beyond])
        sources = self.io.sources(self.path.block_ids)
        self.meeting = Meeting(
            self.prompt, held, sources[held:], self.host.tree,
            self.disk.coming, TailReads(self.read, self.disk.came_last), self,
        )  # fmt: skip

    def read(self, low: int, high: int) -> list[Promotion]:
        return self.disk.fetch_tail(self.path, low, high)

    def split(self, history: History, decoding: int, can_restore_early: bool) -> Split | None:
        self.asked.append(history)
        coming = sum(span.tokens for span in history.coming)
        head = int(coming * self.share) // BLOCK_TOKENS * BLOCK_TOKENS
        return Split(head, 1.0, 0.0, can_restore_early)

    def deliver(self, which: int = 0, outcome: Outcome = Outcome.OK) -> None:
        """End one of the reads under way."""
        if self.io.moves:
            self.io.moves.rotate(-(which % len(self.io.moves)))
            self.io.step(outcome)
            self.disk.poll()

    def fetch_for_another(self) -> None:
        """A request of the same history waits, and what is not on its way is fetched for it."""
        ids, coming = self.path.block_ids, self.disk.coming.block_ids
        first = sum(1 for _ in takewhile(self.host.has, ids))
        count = sum(1 for _ in takewhile(lambda name: name not in coming, ids[first:]))
        self.disk.fetch(self.path, first, count)

    def compute(self, tokens: int, *, saved: bool = True) -> None:
        self.head += tokens
        if saved:
            keep(self.host, SPOKEN[: self.head // BLOCK_TOKENS * BLOCK_BYTES])

    def settle(self) -> None:
        """The request is over, and so is every read: nothing is left of the meeting."""
        self.meeting.close()
        while self.io.moves:
            self.deliver()
        self.host.check_integrity()
        assert self.host.staged_slots == 0 and not len(self.disk.coming)
        assert all(node.pins == 0 for node in self.host.tree.nodes())
        assert self.ends == Counter(self.io.begun), "every read ends once"
