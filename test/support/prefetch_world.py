"""A waiting queue over tiers whose blocks come when a test says so."""

from __future__ import annotations

from collections import Counter

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import Block, IsProtected
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.fetch_costs import Missing
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.prefetch import Prefetcher
from sglang_hc.tree.identity import BLOCK_BYTES, BlockPath, Prefix
from support.rates import ConstantRates

SLOW_PREFILL = ConstantRates(1.0, BLOCK_TOKENS / 100)
"""One second to fetch a block, a hundred to recompute it. With the next a hundredth."""
FAST_PREFILL = ConstantRates(1.0, BLOCK_TOKENS * 100)


class OneBlock:
    """A block as `is_protected` sees it."""

    def __init__(self, block_id: bytes) -> None:
        self.block_id = block_id


class Tiers:
    """Below: a request is named by its path, one letter per block, which all lie on disk.

    Blocks that were evicted for others are chosen by nothing but `is_protected`."""

    def __init__(self, slots: int = 1000) -> None:
        self.host: dict[bytes, None] = {}
        self.slots = slots
        self.asking: set[str] = set()
        self.begun: list[tuple[str, str]] = []
        self.coming = self.staged = set[bytes]()
        self.meets, self.looks, self.kept_free = set[str](), 0, 0

    def path(self, request: str) -> list[bytes]:
        return [request[: end + 1].encode() for end in range(len(request))]

    def missing(self, request: str) -> Missing | None:
        self.looks += 1
        if request in self.asking:
            return None
        path = self.path(request)
        first = next((i for i, b in enumerate(path) if b not in self.host), len(path))
        prompt = Prefix(None, bytes(len(path) * BLOCK_BYTES))
        sources = [SourceTier.DISK] * (len(path) - first)
        return Missing(BlockPath(prompt, path), first, sources, 0)

    def reading(self, _: SourceTier) -> int:
        return len(self.staged)

    def in_host(self, block_id: bytes) -> bool:
        return block_id in self.host

    def start(
        self,
        request: str,
        missing: Missing,
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int:
        assert not {*missing.path.block_ids[first : first + count]} & self.staged, "fetched twice"
        done = 0
        while done < count and self.make_room(is_protected):
            self.staged.add(missing.path.block_ids[first + done])
            done += 1
        if done:
            self.begun.append((request, request[first : first + done]))
        return done

    def meet(
        self, request: str, missing: Missing, end: int, is_protected: IsProtected[Block] | None
    ) -> bool:
        if request not in self.meets:
            return False
        self.begun.append((request, f"meet {request[missing.first : end]}"))
        return True

    def make_room(self, is_protected: IsProtected[Block] | None) -> bool:
        if len(self.host) + len(self.staged) < self.slots:
            return True
        for block_id in self.host:
            if is_protected is None or not is_protected(OneBlock(block_id)):  # type: ignore[arg-type]
                del self.host[block_id]
                return True
        return False

    def keep_free(self, slots: int, is_protected: IsProtected[Block]) -> None:
        self.kept_free = slots
        while self.slots - len(self.host) - len(self.staged) < slots:
            unneeded = [b for b in self.host if not is_protected(OneBlock(b))]  # type: ignore[arg-type]
            if not unneeded:
                return
            del self.host[unneeded[0]]


class World:
    """A queue over those tiers; admissions come every ten seconds."""

    def __init__(
        self, costs: RestorePlanner, mode: str = "queue", slots: int = 1000, blocks: int = 4
    ) -> None:
        """blocks: of each of the requests that came before."""
        self.below = Tiers(slots)
        self.prefetcher = Prefetcher(
            LookAhead(), self.below, costs, (slots, 10_000), mode, Counter()
        )
        for number in range(9):
            self.prefetcher.finished("before", blocks)
            self.prefetcher.admitted([f"before {number}"], 10.0 * number)
        self.queue: list[str] = []

    def arrive(self, *requests: str) -> None:
        for request in requests:
            self.queue.append(request)
            self.prefetcher.arrived(request)

    def look(self) -> list[tuple[str, str]]:
        """A pass. Returns (request, letters of the blocks) of what begins, in its order."""
        self.prefetcher.on_schedule_step(self.queue, self.below.path)
        self.prefetcher.fetch()
        return self.begun()

    def begun(self) -> list[tuple[str, str]]:
        begun, self.below.begun = self.below.begun, []
        return begun

    def come(self, *blocks: str) -> None:
        for block in blocks or sorted(b.decode() for b in self.below.staged):
            self.below.staged.remove(block.encode())
            self.below.host[block.encode()] = None
            self.prefetcher.complete([block.encode()])
