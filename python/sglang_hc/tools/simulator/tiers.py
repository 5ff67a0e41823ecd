"""The tiers of a simulated server: its tree, host tier and policies, time in place of bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.eviction import (
    Block,
    EvictionPolicy,
    IsProtected,
    make_policy,
)
from sglang_hc.policy.learned import LearnedPolicy
from sglang_hc.policy.pins import PinLimitError, SessionPins
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.writing import WriteAdmission, WriteRule
from sglang_hc.queue.away import AwaySessions
from sglang_hc.queue.fetch_costs import Missing
from sglang_hc.queue.lookahead import EVICTION_STRETCH, LookAhead
from sglang_hc.queue.meeting import Meetings, Step, TailReads
from sglang_hc.queue.prefetch import Prefetcher
from sglang_hc.tools.simulator.disk import SimulatedDisk, Transfer
from sglang_hc.tools.simulator.jobs import FINGERPRINT, Job, tail_identity
from sglang_hc.tools.simulator.policies import policy_named
from sglang_hc.tools.simulator.pool import KvPool
from sglang_hc.tree.block_tree import BlockNode, BlockTree, PathMatch
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import BLOCK_BYTES, Prefix
from sglang_hc.tree.promotions import Promotion, Promotions

NOTHING = PathMatch((), 0)


@dataclass(frozen=True)
class TierSizes:
    """Blocks that fit into each tier; 0 for a tier that is not there.

    shared: whether the device's blocks are those of running requests too.
    """

    device: int
    host: int
    disk: int
    shared: bool = False


@dataclass(frozen=True)
class Found:
    """Where the state of a prompt's leading tokens was at admission.

    Tokens count once, in the fastest tier that has them. disk_blocks: of the disk tokens.
    """

    device: int
    host: int
    disk: int
    disk_blocks: tuple[bytes, ...] = ()
    device_nodes: tuple[BlockNode, ...] = field(default=(), repr=False)
    host_nodes: tuple[BlockNode, ...] = field(default=(), repr=False)

    @property
    def tokens(self) -> int:
        return self.device + self.host + self.disk

    def as_late(self) -> Found:
        """The same for a request that waited for the disk at its turn: hits on disk, as they are
        counted in a server's run (`recorded`)."""
        return replace(self, host=0, disk=self.host + self.disk)


Policies = Callable[[], EvictionPolicy[Any]]
"""Makes the policy of a tier."""


class TieredCache:
    """What a server keeps of its requests, and where.

    `prefetch`: queue, on-arrival, at-turn (the disk is read when a request is admitted) or off (it
    is never read, as in a server with `--hc-prefetch off`). `stretch`: eviction window over
    (C_mem + C_disk) / S_kv. `policies` replaces the named policy, e.g. by the clairvoyant one.
    `admission`: what is written to disk; None for everything.
    Times come from the caller.
    """

    def __init__(
        self,
        sizes: TierSizes,
        costs: RestorePlanner,
        *,
        policy: str,
        prefetch: str,
        stretch: float = EVICTION_STRETCH,
        policies: Policies | None = None,
        admission: WriteAdmission | None = None,
        hold: float | None = None,
    ) -> None:
        self.window = LookAhead()
        self.jobs: dict[int, Job] = {}
        self._seen: set[bytes] = set()
        self._now = self._came_last = 0.0
        self._started: list[Transfer] = []
        self._reading = 0

        # The server's disk orders by age outside the window (store/disk/eviction.py).
        on_disk = policies or partial(policy_named, policy, self.window, disk=True)
        self._hold = hold
        self._pins = None if hold is None else SessionPins.sized_for(sizes.host)
        in_memory = policies or partial(policy_named, policy, self.window)

        def nodes(slots: int, policy: EvictionPolicy[Any]) -> HostTier | None:
            return HostTier(BlockTree(FINGERPRINT), slots, policy) if slots else None

        self.away: AwaySessions | None = None
        kept = in_memory() if self._pins is None else make_policy(policy, self.window, self._pins)
        self.host, self.device = nodes(sizes.host, kept), nodes(sizes.device, in_memory())
        if self.host is not None and isinstance(kept, LearnedPolicy):
            self.away = AwaySessions(kept.pauses, kept, self.host.tree, lambda: self._now)
        self.pool = KvPool(self.device) if sizes.shared and self.device is not None else None
        self.in_host = self.host.has if self.host is not None else lambda block_id: False
        self.disk = SimulatedDisk(sizes.disk, on_disk()) if sizes.disk else None
        self._disk_write_free = 0.0
        self._admission = admission
        self.write_seconds = costs.block_seconds(SourceTier.DISK)
        if self.host is None or self.disk is None:
            prefetch = "off"
        self.reads = prefetch != "off"
        self.at_turn = prefetch == "at-turn"
        if self.at_turn:
            prefetch = "off"  # nothing is read before
        counters: Counter[str] = Counter()
        self.prefetcher = Prefetcher(
            self.window, self, costs, (sizes.host, sizes.disk), prefetch, counters, stretch
        )
        self.coming: Collection[bytes] = ()
        if self.host is not None:
            self._coming = Promotions(self.host)
            self.coming = self._coming.block_ids
            self._coming.subscribe(self.prefetcher.complete, self.prefetcher.fail)
        tree = BlockTree(FINGERPRINT) if self.host is None else self.host.tree
        self.meetings = Meetings(tree, costs, counters, lambda: self._now, lambda: None)

    # The waiting queue

    def arrive(self, job: Job) -> None:
        self.jobs[job.number] = job
        if self.away is not None:
            self._pass(job.arrived)
            self.away.came(job.number, job.needs)
        self.prefetcher.arrived(job.number)

    def look_ahead(self, queue: Sequence[int]) -> None:
        """The waiting queue as the next pass sees it."""
        self.prefetcher.on_schedule_step(queue, lambda number: self.jobs[number].needs)

    def prefetch(self, now: float) -> None:
        """The fetches of a pass, into staged slots; see `take_started`."""
        self._pass(now)
        self.prefetcher.fetch()

    def ready(self, number: int, now: float) -> bool:
        """Whether the request, whose turn it is, may be admitted; else it waits for a fetch."""
        self._now = now
        ready = self.prefetcher.ready(number, now)
        if self.meetings.of(number) is not None:
            prompt = self.jobs[number].path.prefix
            tiers = [tier for tier in (self.device, self.host) if tier is not None]
            known = max(tier.tree.match(prompt).tokens for tier in tiers)
            return self.meetings.may_begin(number, known) and ready
        return ready

    def take_started(self) -> list[Transfer]:
        """Fetches begun since the last call, in their order."""
        started, self._started = self._started, []
        return started

    def fetched(self, transfer: Transfer, now: float) -> None:
        """A transfer is through: its blocks become blocks of the host tier."""
        self._came_last = now
        self._reading -= len(transfer)
        self._coming.complete(transfer, now)

    def abort(self, number: int) -> None:
        """The request leaves the queue unserved."""
        self.meetings.end(number)
        self.prefetcher.cancel(number)
        del self.jobs[number]
        if self.away is not None:
            self.away.gone(number)

    # What the prefetcher asks (fetch_costs.Below)

    def missing(self, request: int) -> Missing:
        assert self.disk is not None
        job, disk, now = self.jobs[request], self.disk, self._now
        path = job.path
        first = sum(1 for _ in takewhile(self.in_host, path.block_ids))
        below = islice(path.block_ids, first, None)
        count = sum(1 for _ in takewhile(lambda block_id: disk.readable(block_id, now), below))
        on_device = 0
        if count and self.device is not None:
            on_device = self.device.tree.match(path.prefix).tokens
            if (first + count) * BLOCK_TOKENS <= on_device:
                count = 0
        return Missing(path, first, [SourceTier.DISK] * count, on_device)

    def start(
        self,
        request: int,
        missing: Missing,
        first: int,
        count: int,
        is_protected: IsProtected[Block] | None,
    ) -> int:
        promotions = self._coming.begin(missing.path, first, count, self._now, is_protected)
        self._read(promotions)
        return len(promotions)

    def reading(self, tier: SourceTier) -> int:
        return self._reading if tier is SourceTier.DISK else 0

    def meet(
        self, request: int, missing: Missing, end: int, is_protected: IsProtected[Block] | None
    ) -> bool:
        def read(low: int, high: int) -> list[Promotion]:
            begun = self._coming.begin_tail(missing.path, low, high, self._now, is_protected)
            for promotion in begun:
                self._read([promotion])
            return begun

        tail = TailReads(read, lambda tier: self._came_last)
        return self.meetings.begin(request, missing, end, self._coming, tail)

    def _read(self, transfer: Transfer) -> None:
        if transfer:
            self._reading += len(transfer)
            self._started.append(transfer)

    def keep_free(self, slots: int, is_protected: IsProtected[Block]) -> None:
        assert self.host is not None
        self.host.evict(slots - self.host.free_slots, self._now, is_protected)

    # Admission and completion

    def reusable(self, job: Job) -> tuple[int, int]:
        """(full blocks, tokens) of the prompt that an endless cache would find: once stored."""
        count = 0
        for identity in job.chain:
            if identity not in self._seen:
                break
            count += 1
        tokens = count * BLOCK_TOKENS
        if job.known_tokens > tokens and job.needs[-1] in self._seen:
            tokens = job.known_tokens
        return count, min(tokens, job.prompt_tokens - 1)

    def find(self, job: Job, now: float) -> Found:
        """Longest known prefix of the prompt over all tiers. Changes nothing."""
        prompt = job.path.prefix
        on_device = self.device.tree.match(prompt) if self.device else NOTHING
        in_host = self.host.tree.match(prompt) if self.host else NOTHING
        device, known = on_device.tokens, max(on_device.tokens, in_host.tokens)
        blocks: list[bytes] = []
        if self.disk is not None and self.reads:
            for identity in job.chain[known // BLOCK_TOKENS :]:
                if not self.disk.readable(identity, now):
                    break
                blocks.append(identity)
        end = (known // BLOCK_TOKENS + len(blocks)) * BLOCK_TOKENS if blocks else known
        # The last token is always computed: its logits are wanted.
        limit = job.prompt_tokens - 1
        device, known, end = min(device, limit), min(known, limit), min(end, limit)
        return Found(
            device, known - device, end - known, tuple(blocks), on_device.nodes, in_host.nodes
        )

    def admit(self, job: Job, found: Found, now: float, *, load: bool) -> None:
        """The request starts. `load`: its blocks on disk are read now, through the host tier."""
        self._pass(now)
        if self.device is not None:
            self.device.access(found.device_nodes, now)
        if self.host is not None:
            self.host.access(found.host_nodes, now)
        if self.disk is not None:
            self.disk.access(job.chain)
        if load and self.host is not None:
            missing = self.missing(job.number)
            wanted = missing.path.block_ids[missing.first : missing.first + missing.count]
            if not any(block_id in self.coming for block_id in wanted):
                self.start(job.number, missing, missing.first, missing.count, None)
                for transfer in self.take_started():
                    self.fetched(transfer, now)

    def next_step(self, number: int, head: int, now: float) -> Step:
        """What a request that meets its history does behind its first `head` tokens."""
        self._now = now
        return self.meetings.next(number, head)

    def computed(self, job: Job, head: int, now: float) -> None:
        """The first `head` tokens of a prompt are computed: their whole blocks go below."""
        if self.host is not None:
            _store(self.host, job.prompt[: head // BLOCK_TOKENS * BLOCK_BYTES], now)

    def join(self, number: int, head: int, now: float) -> bool:
        """What was read continues the request's first `head` tokens; False when it cannot."""
        self._now = now
        return self.meetings.join(number, head) is not None

    def finish(self, job: Job, kept: bytes, chain: list[bytes], now: float) -> None:
        """The request ends; `kept` (blocks `chain`) is on the device and goes below."""
        self._pass(now)
        del self.jobs[job.number]
        self.prefetcher.finished(job.number, len(chain))
        self._seen.update(chain)
        tail = tail_identity(chain, kept)
        if tail is not None:
            self._seen.add(tail)
        if self.disk is not None:
            self._write(self.disk, chain, now)
        if self.pool is not None:
            self.pool.release(job.number)
        if self.device is not None:
            _store(self.device, kept, now, self.pool.held if self.pool is not None else 0)
        if self.host is not None:
            _store(self.host, kept, now)
        self.meetings.end(job.number)
        if self.away is not None:
            self.away.answered(job.number, Prefix(None, kept), job.prompt_tokens, job.calls)
        if self._pins is not None and self._hold is not None:
            with suppress(PinLimitError):
                self._pins.pin(None, str(job.session), chain, self._hold, now)

    def _pass(self, now: float) -> None:
        """So much time has passed."""
        self._now = now
        if self.away is not None:
            self.away.upkeep()
        if self._pins is not None:
            self._pins.expire(now)

    def _write(self, disk: SimulatedDisk, chain: list[bytes], now: float) -> None:
        """A path was used: write what is not on disk, as the server does (store/lower_tier.py)."""
        admission, parent = self._admission, None
        for identity in chain if admission is None else chain[: admission.used(chain, now)]:
            if not disk.holds(identity):
                if admission is not None and not admission.take(now):
                    return
                self._disk_write_free = max(self._disk_write_free, now) + self.write_seconds
                if not disk.write(parent, identity, self._disk_write_free):
                    return
            parent = identity


def admission_of(write: str, block_bytes: int) -> WriteAdmission | None:
    """What `--hc-write` lets a server write; None for everything. Raises ConfigError."""
    rule = WriteRule.parse(write)
    return None if rule is None else WriteAdmission(rule, block_bytes, 0.0)


def _store(tier: HostTier, tokens: bytes, now: float, held: int = 0) -> None:
    """Bring a whole path into a tier from the device, as far as slots can be had; so many free ones
    are `held` for others.

    The path is pinned meanwhile: a block must not push out its own parent.
    """
    match = tier.tree.match(Prefix(None, tokens))
    tier.pin(match.nodes)
    start = match.tokens // BLOCK_TOKENS * BLOCK_BYTES
    offsets = range(start, len(tokens), BLOCK_BYTES)
    tier.evict(len(offsets) - tier.free_slots + held, now)
    full = match.tokens // BLOCK_TOKENS
    # Looked up only now: making room may have emptied the tree.
    parent = match.nodes[full - 1] if full else tier.tree.root(None)
    for offset in offsets[: max(0, tier.free_slots - held)]:
        slot = tier.stage(now)
        assert slot is not None
        outcome = tier.publish(parent, tokens[offset : offset + BLOCK_BYTES], slot, now)
        if not outcome.created:
            tier.unstage(slot)
        parent = outcome.node
        tier.mark_ready(parent)
    tier.unpin(match.nodes)
