"""The tiers of a simulated server: its tree, host tier and policies, time in place of bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import EvictionPolicy, LruPolicy, make_policy
from sglang_hc.policy.prefetch import (
    Candidate,
    FetchCosts,
    PrefetchPlanner,
    TurnEstimate,
    missing_blocks,
    reserve_slots,
)
from sglang_hc.policy.windows import EVICTION_STRETCH, LookAhead, RunningMean, window_length
from sglang_hc.simulator.disk import DiskBlock, DiskTier
from sglang_hc.simulator.jobs import FINGERPRINT, Job, tail_identity
from sglang_hc.tree.block_tree import BLOCK_BYTES, BlockNode, BlockTree, PathMatch
from sglang_hc.tree.host_tier import HostTier

ANYBODY, NOBODY = float("-inf"), float("inf")
"""Ranks before and behind every waiting request."""

RECHECKED = 48
"""Requests at the head whose blocks are looked for again in every pass: others may have evicted
them since their prefetch."""


NOTHING = PathMatch(None, (), 0)


@dataclass(frozen=True)
class TierSizes:
    """Blocks that fit into each tier; 0 for a tier that is not there."""

    device: int
    host: int
    disk: int


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


@dataclass(frozen=True)
class Transfer:
    """Blocks of one request on their way from disk to the staged host slots."""

    job: Job
    blocks: tuple[bytes, ...]
    slots: dict[bytes, int] = field(repr=False)


NodePolicies = Callable[[str], EvictionPolicy[BlockNode]]
DiskPolicies = Callable[[], EvictionPolicy[DiskBlock]]


class TieredCache:
    """What a server keeps of its requests, and where.

    `prefetch`: queue, on-arrival or off. `stretch`: eviction window over (C_mem + C_disk) / S_kv.
    `node_policy` and `disk_policy` replace the named policy,
    e.g. by the clairvoyant one. Times come from the caller.
    """

    def __init__(
        self,
        sizes: TierSizes,
        slot_bytes: int,
        costs: FetchCosts,
        *,
        policy: str,
        prefetch: str,
        stretch: float = EVICTION_STRETCH,
        node_policy: NodePolicies | None = None,
        disk_policy: DiskPolicies | None = None,
    ) -> None:
        self.window: LookAhead[int] = LookAhead()
        self.jobs: dict[int, Job] = {}
        self.turns = TurnEstimate()
        self._sizes = sizes
        self._slot_bytes = slot_bytes
        self._mode = prefetch
        self._stretch = stretch
        self._planner: PrefetchPlanner[int] = PrefetchPlanner(costs, slot_bytes)
        self._mean = RunningMean()
        self._unfetched: dict[int, None] = {}
        self._seen: set[bytes] = set()

        def nodes(tier: str, slots: int) -> tuple[HostTier | None, EvictionPolicy[BlockNode]]:
            if not slots:
                return None, LruPolicy()  # never told of a block
            order = node_policy(tier) if node_policy else make_policy(policy, self.window)
            return HostTier(BlockTree(FINGERPRINT), slots, order), order

        self.host, self._host_policy = nodes("host", sizes.host)
        self.device, self._device_policy = nodes("device", sizes.device)
        self.disk: DiskTier | None = None
        if sizes.disk:
            order = disk_policy() if disk_policy else make_policy(policy, self.window)
            self.disk = DiskTier(sizes.disk, order)
        self._disk_write_free = 0.0
        self._write_seconds = costs.fetch_seconds(slot_bytes)

    # The waiting queue

    def arrive(self, job: Job) -> None:
        self.jobs[job.number] = job
        if self._mode != "off":
            self._unfetched[job.number] = None

    def look_ahead(self, queue: Sequence[int]) -> None:
        """The waiting queue as the next pass sees it."""
        capacity = float(self._sizes.host + self._sizes.disk) * self._slot_bytes
        length = int(self._stretch * window_length(capacity, self._mean.value))
        self.window.update(queue, length, lambda number: self.jobs[number].needs)

    def prefetch(self, now: float) -> list[Transfer]:
        """Fetches to start now, in this order. Their slots are staged."""
        if self.host is None or self.disk is None or self._mode == "off":
            return []
        self._keep_reserve(now)
        out = []
        for fetch in self._planner.plan(self._candidates(now)):
            job = self.jobs[fetch.request]
            transfer = self._stage(job, fetch.blocks, now)
            if transfer is not None:
                self._planner.started(job.number, transfer.blocks)
                out.append(transfer)
        return out

    def is_fetching(self, number: int) -> bool:
        return self._planner.is_fetching(number)

    def fetched(self, transfer: Transfer, now: float) -> None:
        """A transfer is through: its blocks become blocks of the host tier."""
        wanted = [b for b in transfer.blocks if self._planner.is_under_way(b)]
        self._planner.completed(wanted)
        self._publish(transfer.job, dict(transfer.slots), now)

    def abort(self, number: int) -> None:
        """The request leaves the queue unserved."""
        self.window.discard(number)
        self._planner.cancel(number)
        self._unfetched.pop(number, None)
        del self.jobs[number]

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
        on_device = self.device.tree.match(None, job.prompt) if self.device else NOTHING
        in_host = self.host.tree.match(None, job.prompt) if self.host else NOTHING
        device, known = on_device.tokens, max(on_device.tokens, in_host.tokens)
        blocks: list[bytes] = []
        if self.disk is not None:
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
        self._planner.cancel(job.number)
        self._unfetched.pop(job.number, None)
        if self.device is not None:
            self.device.access(found.device_nodes, now)
        if self.host is not None:
            self.host.access(found.host_nodes, now)
        if self.disk is not None:
            self.disk.access(job.chain, now)
        if load and self.host is not None:
            transfer = self._stage(job, found.disk_blocks, now, force=True)
            if transfer is not None:
                self._publish(job, dict(transfer.slots), now)

    def finish(
        self, job: Job, kept: bytes, chain: list[bytes], now: float, *, replaces: bool
    ) -> None:
        """The request ends; `kept` (blocks `chain`) is on the device and goes to the tiers below.

        replaces: the conversation was cut, so what was stored of it before is of no use.
        """
        del self.jobs[job.number]
        self._mean.add(max(1, len(chain)) * self._slot_bytes)
        self._seen.update(chain)
        tail = tail_identity(chain, kept)
        if tail is not None:
            self._seen.add(tail)
        if replaces:
            self._forget_path(job)
        if self.disk is not None:
            parent: bytes | None = None
            for identity in chain:
                if not self.disk.holds(identity):
                    self._disk_write_free = max(self._disk_write_free, now) + self._write_seconds
                    if not self.disk.write(parent, identity, now, self._disk_write_free):
                        break
                parent = identity
        if self.device is not None:
            self._store(self.device, self._device_policy, kept, now)
        if self.host is not None:
            self._store(self.host, self._host_policy, kept, now)

    # Inner parts

    def _candidates(self, now: float) -> list[Candidate[int]]:
        """Waiting requests inside the prefetch window that may lack blocks."""
        assert self.host is not None and self.disk is not None
        disk = self.disk
        if self._mode == "on-arrival":
            numbers = list(self._unfetched)
            turn_in = dict.fromkeys(numbers, float("inf"))
        else:
            usable = float(self._sizes.host - self._reserve()) * self._slot_bytes
            length = window_length(usable, self._mean.value)
            numbers = []
            turn_in = {}
            for position, number in enumerate(self.window.order[:length]):
                if position < RECHECKED or number in self._unfetched:
                    turn_in[number] = self.turns.turn_in(position)
                    numbers.append(number)
        out = []
        for number in numbers:
            job = self.jobs[number]
            if self._unfetched.pop(number, self) is self and (
                job.deepest is None or job.deepest in self._host_policy
            ):
                continue  # looked at before, and all that was on disk is still in host memory
            first, missing = missing_blocks(
                job.chain,
                self._host_policy.__contains__,
                lambda identity: disk.readable(identity, now),
            )
            known = first + len(missing)
            job.deepest = job.chain[known - 1] if known else None
            if missing:
                out.append(Candidate(number, turn_in[number], missing, first * BLOCK_TOKENS))
        return out

    def _reserve(self) -> int:
        return reserve_slots(self._sizes.host, self._mean.value / self._slot_bytes)

    def _keep_reserve(self, now: float) -> None:
        """Early eviction, so that a prefetch finds free slots (AttentionStore section 3.3.1)."""
        assert self.host is not None
        self._make_room(self.host, self._host_policy, self._reserve(), NOBODY, now)

    def _stage(
        self, job: Job, blocks: Sequence[bytes], now: float, *, force: bool = False
    ) -> Transfer | None:
        """Host slots for as many leading blocks as may displace others."""
        assert self.host is not None
        rank = None if force else self.window.rank(job.number)
        self._make_room(
            self.host, self._host_policy, len(blocks), ANYBODY if rank is None else rank, now
        )
        slots: dict[bytes, int] = {}
        for identity in blocks[: self.host.free_slots]:
            slot = self.host.stage(now)
            assert slot is not None
            slots[identity] = slot
        if len(slots) < len(blocks):
            self._unfetched[job.number] = None
        return Transfer(job, tuple(slots), slots) if slots else None

    def _make_room(
        self,
        tier: HostTier,
        policy: EvictionPolicy[BlockNode],
        count: int,
        rank: float,
        now: float,
    ) -> None:
        """Evict until `count` slots are free, nothing that a sooner request than `rank` needs."""
        if tier.free_slots >= count:
            return
        for victim in policy.victims():
            if not policy.yields(victim, rank):
                break
            tier.drop(victim)
            tier.evicted_blocks += 1
            if tier.free_slots >= count:
                break

    def _publish(self, job: Job, slots: dict[bytes, int], now: float) -> None:
        """Staged slots become blocks where their place in the path is reachable."""
        assert self.host is not None
        match = self.host.tree.match(None, job.prompt)
        parent = match.full_parent or self.host.tree.root(None)
        for index in range(match.tokens // BLOCK_TOKENS, len(job.chain)):
            slot = slots.pop(job.chain[index], None)
            if slot is None:
                break
            piece = job.prompt[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            outcome = self.host.publish(parent, piece, slot, now)
            if not outcome.created:
                self.host.unstage(slot)
            parent = outcome.node
            self.host.mark_ready(parent)
        for slot in slots.values():
            self.host.unstage(slot)

    def _store(
        self, tier: HostTier, policy: EvictionPolicy[BlockNode], tokens: bytes, now: float
    ) -> None:
        """Bring a whole path into a tier from the device, as far as slots can be had.

        The path is pinned meanwhile: a block must not push out its own parent.
        """
        match = tier.tree.match(None, tokens)
        tier.pin(match.nodes)
        start = match.tokens // BLOCK_TOKENS * BLOCK_BYTES
        offsets = range(start, len(tokens), BLOCK_BYTES)
        self._make_room(tier, policy, len(offsets), ANYBODY, now)
        parent = match.full_parent
        if parent is None or parent.is_root:  # making room may have emptied the tree
            parent = tier.tree.root(None)
        for offset in offsets[: tier.free_slots]:
            slot = tier.stage(now)
            assert slot is not None
            outcome = tier.publish(parent, tokens[offset : offset + BLOCK_BYTES], slot, now)
            if not outcome.created:
                tier.unstage(slot)
            parent = outcome.node
            tier.mark_ready(parent)
        tier.unpin(match.nodes)

    def _forget_path(self, job: Job) -> None:
        for tier in (self.device, self.host):
            if tier is not None:
                for node in reversed(tier.tree.match(None, job.prompt).nodes):
                    if not node.is_leaf or node.pins:
                        break
                    tier.drop(node)
        if self.disk is not None:
            self.disk.drop(job.chain)
