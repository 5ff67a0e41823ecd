"""What waiting requests lack in host memory, where that lies, and how it is brought there.

These are the tiers as the prefetcher sees them (`fetch_costs.Below`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import Block, IsProtected
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.queue.fetch_costs import FetchedEnd, Missing
from sglang_hc.queue.meeting import Meetings, TailReads
from sglang_hc.queue.mover import BlockMover
from sglang_hc.queue.requests import QueuedPrompt, RequestTable, Serial
from sglang_hc.store.ends_below import EndsBelow
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.cuts import EarlierPath
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BlockPath


class Sources:
    """See the module. Belongs to the scheduler thread."""

    def __init__(
        self,
        host: HostTier,
        disk: LowerTier | None,
        mover: BlockMover | None,
        requests: RequestTable,
        meetings: Meetings | None,
        clock: Callable[[], float],
    ) -> None:
        """meetings: None where no history is met."""
        self._host = host
        self.in_host = host.has
        self._disk = disk
        self._mover = mover
        self.requests = requests
        self._meetings = meetings
        self._ends = None if disk is None else disk.ends
        self._now = clock
        below = disk if disk is not None else mover
        self.coming: Collection[bytes] = () if below is None else below.coming.block_ids

    def look_at(self, request: Serial) -> QueuedPrompt:
        """What a waiting request is."""
        record = self.requests[request]
        if record.waiting is None:
            record.waiting = record.look()
        return record.waiting

    def missing(self, request: Serial) -> Missing | None:
        """Blocks that can be had and are not in host memory; see `fetch_costs.Below`."""
        path = self._path_of(request)
        first = sum(1 for _ in takewhile(self.in_host, path.block_ids))
        sources = self._find(request, path, first)
        if sources is None:
            return None
        on_device = self.look_at(request).on_device() if sources else 0
        if (first + len(sources)) * BLOCK_TOKENS <= on_device:
            sources = ()
        if self._ends is None:
            return Missing(path, first, sources, on_device)
        return self._up_to_end(self._ends, Missing(path, first, sources, on_device))

    def _up_to_end(self, ends: EndsBelow, missing: Missing) -> Missing | None:
        """What is missing up to the last end that can be had."""
        found = ends.find(missing.path, missing.first + missing.count)
        if found is None:
            return None
        lacks = found.lacking and found.blocks * BLOCK_TOKENS > missing.on_device
        begin = partial(ends.fetch, missing.path, found) if lacks else None
        sources = missing.sources[: max(0, found.blocks - missing.first)] if lacks else ()
        end = FetchedEnd(found.blocks, found.usable, begin)
        return replace(missing, sources=sources, end=end)

    def reading(self, tier: SourceTier) -> int:
        """Blocks that are being read from a tier."""
        return 0 if self._disk is None else self._disk.reading(tier)

    def start(
        self,
        request: Serial,
        missing: Missing,
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int:
        """Read blocks from disk, or move them, into staged slots; see `fetch_costs.Below`."""
        path, earlier = missing.path, self.requests[request].earlier
        if self._mover is not None and earlier:
            started = self._mover.fetch(path, earlier, first, count, is_protected)
        else:
            assert self._disk is not None
            started = self._disk.fetch(path, first, count, is_protected)
        if started:
            self.requests[request].restore_seconds = None
        return started

    def keep_free(self, slots: int, is_protected: IsProtected[Block]) -> None:
        """Early eviction, so that a prefetch finds free slots (AttentionStore section 3.3.1)."""
        if self._host.free_slots < slots:
            self._host.evict(slots - self._host.free_slots, self._now(), is_protected)

    def meet(
        self, request: Serial, missing: Missing, end: int, is_protected: IsProtected[Block] | None
    ) -> bool:
        """See `fetch_costs.Below`."""
        disk = self._disk
        if self._meetings is None or disk is None or self.requests[request].earlier:
            return False  # of a cut prompt some blocks are made of others

        read = partial(disk.fetch_tail, missing.path, is_protected=is_protected)
        tail = TailReads(read, disk.came_last)
        return self._meetings.begin(request, missing, end, disk.coming, tail)

    def needs_of(self, request: Serial) -> Sequence[bytes]:
        """Blocks that the request can use, wherever they are; worked out once per request."""
        record = self.requests[request]
        if record.needs is None:
            prompt, _, earlier = self.look_at(request)
            record.needs, record.path = self._host.tree.path(prompt)
            if self._disk is not None:
                record.path = self._disk.trusted(record.path)
            if earlier is not None and self._mover is not None:
                ways = earlier.paths(self._host.tree.fingerprint, prompt.tokens)
                if self._disk is not None:
                    trusted = self._disk.trusted
                    ways = tuple(way._replace(path=trusted(way.path)) for way in ways)
                record.earlier = ways
                moving = self._to_move(record.path.block_ids, record.earlier)
                record.needs = [*record.needs, *moving]
        return record.needs

    def _to_move(self, own: Sequence[bytes], earlier: Sequence[EarlierPath]) -> Iterator[bytes]:
        """Blocks of earlier paths that a path of `own` blocks can use, as far as host memory lacks
        these."""
        first = sum(1 for _ in takewhile(self.in_host, own))
        for way in earlier:
            ids = way.path.block_ids
            places = (way.place(block) for block in range(first, len(own)))
            yield from (ids[place] for place in places if place < len(ids))

    def _find(self, request: Serial, path: BlockPath, first: int) -> Sequence[SourceTier] | None:
        """Where the blocks from `first` on that can be brought to host memory lie; None: not known
        yet."""
        earlier = self.requests[request].earlier
        if self._mover is not None and earlier:
            return self._mover.find(path, earlier, first)
        if self._disk is None:
            return ()
        wanted = path.block_ids[first:]
        count = self._disk.find(wanted)
        return None if count is None else self._disk.sources(wanted[:count])

    def _path_of(self, request: Serial) -> BlockPath:
        self.needs_of(request)
        path = self.requests[request].path
        assert path is not None
        return path

    def restore_cost(self, request: Serial, costs: RestorePlanner) -> float:
        """Cost to restore what the request has in the tiers, in the units of `costs`."""
        waiting = self.look_at(request)
        on_device = waiting.on_device()
        known = max(self._host.tree.match(waiting.prompt).tokens, on_device)
        cost = costs.token_seconds(SourceTier.HOST) * (known - on_device)
        if self._disk is not None:
            beyond = self._path_of(request).block_ids[known // BLOCK_TOKENS :]
            below = Counter(self._disk.sources(list(takewhile(self._disk.holds, beyond))))
            for tier, blocks in below.items():
                cost += costs.token_seconds(tier) * blocks * BLOCK_TOKENS
        return cost
