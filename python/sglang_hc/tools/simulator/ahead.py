"""What waiting requests have in host memory is restored before their turn, as `srt/tree/ahead.py`
does it: a few blocks in each pass, for the first requests of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.restore_plan import Choice
from sglang_hc.tools.simulator.costs import GpuCosts
from sglang_hc.tools.simulator.jobs import Job
from sglang_hc.tools.simulator.tiers import TieredCache

REQUESTS = 8
BLOCKS_PER_PASS = 4
"""As in the server."""


class RestoredAhead:
    """By request: how many blocks are on the device, and how many more are worth it."""

    def __init__(self, cache: TieredCache, costs: GpuCosts, read_buffer: bool = False) -> None:
        """read_buffer: as AttentionStore does it (section 3.2.1): all that is in host memory, as it
        is stored and as fast as the link can."""
        self._cache, self._costs, self._read_buffer = cache, costs, read_buffer
        self._done: dict[int, int] = {}
        self._todo: dict[int, tuple[int, int]] = {}

    def tokens(self, number: int) -> int:
        """That a waiting request has on the device."""
        done, pool = self._done.get(number, 0), self._cache.pool
        return BLOCK_TOKENS * (done if pool is None else min(done, pool.ahead(number)))

    def admitted(self, number: int) -> None:
        """The request has its rows now."""
        self._todo.pop(number, None)
        self._done.pop(number, None)

    def restore(self, queue: Sequence[int], passes: int, seconds: float, now: float) -> float:
        """Restore for waiting requests beside so many passes, in which the link is free for
        `seconds`. Returns the seconds by which the passes take longer."""
        costs, cache = self._costs, self._cache
        if cache.host is None or not costs.can_restore_early:
            return 0.0
        left = BLOCKS_PER_PASS * passes
        if costs.cost.overlap:
            copied = max(1, int(seconds / costs.block_copy))
            left = copied if self._read_buffer else min(left, copied)
        blocks = 0
        for number in queue[:REQUESTS]:
            if blocks == left:
                break
            if cache.window.requests.is_fetching(number):
                self._todo.pop(number, None)  # there will be more
            elif cache.meetings.of(number) is None:
                blocks += self._some(cache.jobs[number], left - blocks, passes > 1, now)
        if not blocks:
            return 0.0
        return costs.projected(blocks) if costs.cost.overlap else costs.restored_early(blocks)

    def _some(self, job: Job, most: int, at_once: bool, now: float) -> int:
        """So many blocks at most of one request. Nothing in the pass that finds it, unless more
        follow."""
        number, cache = job.number, self._cache
        if number not in self._todo:
            self._todo[number] = self._worth(job, now)
            if not at_once:
                return 0
        begin, end = self._todo[number]
        count = min(most, end - begin)
        if count <= 0:
            return 0
        if not cache.in_host(job.chain[begin + count - 1]):  # it has left since
            self._todo[number] = end, end
            return 0
        if cache.pool is not None and not cache.pool.hold_ahead(number, count):
            return 0
        self._todo[number] = begin + count, end
        self._done[number] = self._done.get(number, 0) + count
        return count

    def _worth(self, job: Job, now: float) -> tuple[int, int]:
        """Blocks [begin, end) of the prompt that host memory has and the device lacks, if all of
        them are worth restoring as they are stored."""
        found = self._cache.find(job, now)
        there = found.device + BLOCK_TOKENS * self._done.get(job.number, 0)
        tokens = found.device + found.host - there
        if tokens < BLOCK_TOKENS:
            return 0, 0
        plan = self._costs.restored(tokens, there, job.prompt_tokens - there - tokens)
        if plan.choice is not Choice.LOAD and not self._read_buffer:
            return 0, 0
        return -(-there // BLOCK_TOKENS), (there + tokens) // BLOCK_TOKENS
