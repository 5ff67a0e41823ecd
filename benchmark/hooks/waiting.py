"""A pass over 1,000 waiting requests, apart from what it costs to move one request's blocks."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmark.hooks.parts import cache_over, microseconds, scheduler_with, summary, tiers_of
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.queue.requests import Serial
from sglang_hc.srt.scheduling.hooks import arrange
from sglang_hc.srt.tree.device_eviction import DeviceOrder
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import BlockDone, Change
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting

WAITING, BLOCKS, HOST_SLOTS = 1000, 32, 4096


class InstantDisk:
    """Holds every block, or none, and reads at once: what is timed is our side."""

    name = "disk"
    capacity = WAITING * BLOCKS
    tiers = (SourceTier.DISK,)

    def __init__(self, *, full: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._full = full
        self._done: list[BlockDone] = []

    def sources(self, block_ids: Sequence[bytes]) -> list[SourceTier]:
        return [SourceTier.DISK] * len(block_ids)

    def ask(self, block_ids: Sequence[bytes]) -> bool:
        return False

    def write(self, ticket: int, block: Block, slot: int, deadline: float) -> None:
        self._done.append(BlockDone(ticket, Outcome.OK, self.name))

    def touch(self, block_ids: Sequence[bytes]) -> None:
        return None

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        return None

    def levels(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return None

    def contains(self, block_ids: Sequence[bytes]) -> int:
        return len(block_ids) if self._full else 0

    def wants(self, block_id: bytes, *, had: bool = False) -> bool:
        return not self._full

    def news(self, *, anew: bool = False) -> list[Change]:
        return []

    def read(
        self,
        ticket: int,
        block_id: bytes,
        slot: int,
        deadline: float,
    ) -> None:
        self._done.append(BlockDone(ticket, Outcome.OK, self.name))

    def expect(self, uses: Mapping[bytes, float | None]) -> None:
        return None

    def poll(self) -> list[BlockDone]:
        done, self._done = self._done, []
        return done


class Queue:
    """A scheduler's waiting queue over the real tree, windows, tiers and admission."""

    def __init__(self, disk: InstantDisk | None, *, ready_first: bool) -> None:
        tiers = tiers_of(HOST_SLOTS, disk, by_queue=True, ready_first=ready_first)
        for _ in range(64):
            tiers.queue.finished(Serial(-1), BLOCKS)
        retention = tiers.retention
        order = DeviceOrder(tiers.host.tree.fingerprint, retention.priority)
        scheduler: Any = scheduler_with(1)  # those who wait, wait for others
        self.waiting: list[Any] = scheduler.waiting_queue
        self.cache = cache_over(tiers, order, scheduler)
        self.running: list[Any] = []
        self.policy = SimpleNamespace(tree_cache=self.cache)
        self.count = 0
        for _ in range(WAITING):
            self.arrive()
        for _ in range(50):  # reads begin and end
            self.cache.check_hicache_events()

    def arrive(self) -> None:
        """A request of BLOCKS blocks is queued, as the scheduler does it."""
        tokens = array("q", range(self.count, self.count + BLOCKS * BLOCK_TOKENS + 1))
        req = SimpleNamespace(
            rid=f"r{self.count}", full_untruncated_fill_ids=tokens, extra_key=None,
            skip_radix_cache_insert=False,
            sampling_params=SimpleNamespace(custom_params=None), cache_request_handle=object(),
            kv=SimpleNamespace(req_pool_idx=None), session=None, finished=lambda: True,
        )  # fmt: skip
        self.count += 1
        self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens), req=req))
        self.cache.prefetch_from_storage(req.cache_request_handle)
        self.waiting.append(req)

    def one_pass(self) -> None:
        """What a pass asks of the tiers: completions, a look at the queue, order, the first one."""
        self.cache.check_hicache_events()
        arrange(None, self.policy, self.waiting)
        self.cache.check_prefetch_progress(self.waiting[0].cache_request_handle)

    def admit(self) -> None:
        """The first that may be admitted is; the one of the pass before is over."""
        for req in self.running:
            self.cache.waiting.finished(req, BLOCKS)
        arrange(None, self.policy, self.waiting)
        ready = self.cache.check_prefetch_progress
        chosen = next(r for r in self.waiting if ready(r.cache_request_handle))
        self.waiting.remove(chosen)
        self.cache.pop_prefetch_loaded_tokens(chosen.cache_request_handle)
        chosen.kv.req_pool_idx = 0
        self.running = [chosen]

    def still(self, passes: int) -> list[float]:
        """Microseconds of passes in which nothing has changed."""
        return [microseconds(self.one_pass) for _ in range(passes)]

    def moving(self, passes: int) -> list[float]:
        """Microseconds of passes before which one request was admitted, and one came."""
        times = []
        for _ in range(passes):
            self.admit()
            self.arrive()
            times.append(microseconds(self.one_pass))
        return times


def measure_queue(passes: int) -> list[dict[str, Any]]:
    """The passes of each arm. With a disk also those that move BLOCKS blocks from it to the host:
    as many leave there, are read and published."""
    rows = []
    for with_disk in (False, True):
        for ready_first in (False, True):
            queue = Queue(InstantDisk(full=False) if with_disk else None, ready_first=ready_first)
            still, moving = queue.still(passes), queue.moving(passes)
            row: dict[str, object] = {
                "disk": with_disk,
                "schedule": "ready-first" if ready_first else "off",
                "nothing new": summary(still),
                "one admitted, one new": summary(moving),
            }
            if with_disk:
                full = Queue(InstantDisk(full=True), ready_first=ready_first).moving(passes)
                beyond = statistics.median(full) - statistics.median(moving)
                row["and its blocks fetched"] = summary(full)
                row["us per block"] = round(beyond / BLOCKS, 2)
            rows.append(row)
    return rows
