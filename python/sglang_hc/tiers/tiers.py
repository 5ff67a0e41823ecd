"""The tiers below the device as one object: look up, restore, capture, account.

Everything the radix tree needs, without SGLang. Belongs to the scheduler thread; `gate` and
`after_pass` are called where the model runs, which is the same thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from sglang_hc.capture.capture import Capture, Segment
from sglang_hc.capture.snapshots import Filing
from sglang_hc.capture.taps import TapBuffer
from sglang_hc.device.copy_stream import Lane, Mark, Side
from sglang_hc.device.exactness import Exactness
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout
from sglang_hc.policy.cost_correction import CorrectedCosts
from sglang_hc.policy.cost_model import CostModel
from sglang_hc.queue.lookahead import QueueView
from sglang_hc.restore.cost_watch import CostWatch, WatchedGate, WatchedPass, timer_for
from sglang_hc.restore.planner import RestoreChoice
from sglang_hc.restore.read_buffer import ReadBuffer
from sglang_hc.restore.restore_pass import (
    Recomputer,
    Restoration,
    RestorePass,
    RestoreSink,
)
from sglang_hc.restore.staging import StagingRing
from sglang_hc.store.disk_tier import DiskTier
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tiers.retention import Retention
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.host_tier import HostTier


class Tiers:
    """Host tier, capture and restore of one model."""

    def __init__(
        self,
        layout: BlockLayout,
        host: HostTier,
        pool: HostPool,
        capture: Capture,
        filing: Filing,
        sink: RestoreSink,
        lane: Lane,
        device: torch.device,
        taps: TapBuffer | None,
        disk: DiskTier | None = None,
        queue: QueueView | None = None,
        recomputer: Recomputer | None = None,
        staging: StagingRing | None = None,
        read_buffer: ReadBuffer | None = None,
        cost: CostModel | None = None,
        side: Side | None = None,
        retention: Retention | None = None,
        always: bool = False,
        exactness: Exactness | None = None,
    ) -> None:
        """staging: what restored chunks pass through; None takes the default of the device.
        cost: of this model here, corrected from now on by what is seen; None restores whatever is
        stored, and so does `always`. side: see `RestorePass`. exactness: what was measured at start
        of what comes back; for `stats`."""
        self.layout = layout
        self.host = host
        self.capture = capture
        self.disk = disk
        self.queue = queue
        self.retention = retention
        self.exactness = exactness
        if disk is not None:
            capture.on_ready = disk.spill
            disk.on_staged = filing.bad_slots.discard
        self.gate = WatchedGate(layout.plan.num_layers)
        self.counters: Counter[str] = Counter()
        self.costs = CorrectedCosts(cost) if cost is not None else None
        self._watch = self._watched(lane)
        self.choice = RestoreChoice(
            self.costs, layout.plan, recomputer is not None, self.counters, always=always
        )
        if queue is not None:
            queue.use_costs(self.choice)
        self._pool = pool
        self._filing = filing
        self._sink = sink
        self._lane = lane
        self._staging = staging or StagingRing.sized_for(layout, device, lane)
        self.read_buffer = read_buffer
        self._side = side
        self._taps = taps
        self.recomputer = recomputer
        self._queued: list[tuple[Restoration, Callable[[], None]]] = []
        self._running: dict[int, list[Callable[[], None]]] = {}
        self._releasing: deque[tuple[Mark, tuple[Restoration, ...]]] = deque()

    # -- look up ---------------------------------------------------------------------------------

    def usable(self, namespace: str | None, tokens: bytes) -> tuple[tuple[BlockNode, ...], int]:
        """Blocks of the longest servable prefix of packed `tokens`, and its length in tokens."""
        match = self.host.tree.match(namespace, tokens)
        for index, node in enumerate(match.nodes):
            if not node.ready:
                return match.nodes[:index], index * BLOCK_TOKENS
        return match.nodes, match.tokens

    def used(self, namespace: str | None, tokens: bytes) -> None:
        """A request over packed `tokens` is over: its path was used, wherever it came from."""
        if self.disk is not None:
            self.disk.touch(self.host.tree.identities(namespace, tokens))

    # -- restore ---------------------------------------------------------------------------------

    def queue_restore(self, restoration: Restoration, release: Callable[[], None]) -> None:
        """Restore in the next pass; `release` is called when its device slots hold the state."""
        assert restoration.recompute >= self.layout.plan.recompute, "layers that are not stored"
        self.host.pin(restoration.nodes)
        self.host.access(restoration.nodes, time.monotonic())
        self._queued.append((restoration, release))
        tokens = restoration.stop - restoration.start
        self.counters["restored_tokens"] += tokens
        self.counters["recomputed_layer_tokens"] += tokens * restoration.recompute
        self.counters["restorations"] += 1

    @property
    def has_queued(self) -> bool:
        return bool(self._queued)

    @property
    def restoring(self) -> int:
        """Restorations queued or under way."""
        return len(self._queued) + sum(len(done) for done in self._running.values())

    def start_restores(self) -> int:
        """Begin what is queued; returns the consumer index for the next batch, -1 for nothing.

        Layers that are recomputed are submitted here, before the batch is put together. What that
        raises ends the scheduler, as the same error in a forward pass does: the slots were
        promised, and nothing may read them.
        """
        if not self._queued:
            return -1
        queued, self._queued = self._queued, []
        parts = (
            self.layout,
            self._pool,
            self._sink,
            self._lane,
            [r for r, _ in queued],
            self._staging,
            self.recomputer,
            self.read_buffer,
            self.choice.kv_per_hidden(sum(r.stop - r.start for r, _ in queued)),
            self._side,
        )
        restore = (
            RestorePass(*parts)
            if self._watch is None
            else WatchedPass(self._watch, self._side is not None, *parts)
        )
        index = self.gate.produce(restore)
        self._running[index] = [release for _, release in queued]
        self.gate.recompute(index)
        return index

    def restore_now(self) -> None:
        """Run queued restorations outside any pass: the batch they were queued for did not come."""
        index = self.start_restores()
        if index >= 0:
            self.gate.set_consumer(index)
            self._finish_pass()

    # -- capture ---------------------------------------------------------------------------------

    def before_prefill(self, lengths: Sequence[tuple[int, int]]) -> None:
        """The next forward pass prefills (new, context) tokens per request and does nothing else:
        what it takes is compared with what the costs say."""
        self.gate.prefill_begins(lengths)

    def after_pass(self, segments: Sequence[Segment], rows: int) -> None:
        """A forward pass of `rows` rows was submitted: stage its rows, end its restorations.

        Of a pass with more rows than the taps hold, the first are staged.
        """
        self.gate.pass_ended()
        self._finish_pass()
        if self._taps is not None and segments:
            self.capture.take(segments, self._taps.bytes(min(rows, self._taps.rows)))

    # -- upkeep ----------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in completions. Called in every scheduling pass; never waits."""
        self._filing.poll()
        if self.disk is not None:
            self.disk.poll()
        if self._watch is not None:
            self._watch.poll()
        if self.read_buffer is not None:
            self.read_buffer.poll()
        if self.retention is not None:
            self.retention.upkeep()
        while self._releasing and self._releasing[0][0].done():
            _, restorations = self._releasing.popleft()
            for restoration in restorations:
                self.host.unpin(restoration.nodes)

    def drain(self) -> None:
        """Wait until everything saved so far can be served; for tests and orderly stops."""
        self.capture.flush()
        self._filing.drain()
        if self.disk is not None:
            self.disk.drain()
        self.poll()

    def clear(self) -> None:
        """Forget what the host tier holds; what is on disk stays. Waits for copies under way."""
        self.restore_now()
        self.drain()
        if self.read_buffer is not None:
            self.read_buffer.clear()
        while self._releasing:
            self._releasing[0][0].wait()
            self.poll()
        self.capture.clear()

    def close(self) -> None:
        """Orderly stop: what was computed is saved, and everything given back."""
        self.drain()
        if self.disk is not None:
            self.disk.close()
        self._filing.close()
        self._lane.close()

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info."""
        facts = {} if self.exactness is None else self.exactness.stats()
        plan = str(self.layout.plan)
        return {"layer_plan": plan, **facts, **self.levels(), **self.counts()}

    def levels(self) -> dict[str, float]:
        """Numbers that go up and down."""
        return {
            "host_slots": self.host.num_slots,
            "host_free_slots": self.host.free_slots,
            "host_staged_slots": self.host.staged_slots,
            "host_blocks": self.host.published_blocks,
            "host_bytes": self.host.num_slots * self.layout.slot_bytes,
            **self._filing.levels(),
            **(self.retention.levels() if self.retention is not None else {}),
            **(self.disk.levels() if self.disk is not None else {}),
            **(self.costs.levels() if self.costs is not None else {}),
        }

    def counts(self) -> dict[str, int]:
        """Numbers that only grow; one that never counted is absent."""
        disk = self.disk.counts() if self.disk is not None else Counter[str]()
        early = self.read_buffer.counters if self.read_buffer is not None else Counter[str]()
        total = self.counters + self.capture.counters + self._filing.counts() + disk + early
        if self.queue is not None:
            total += self.queue.counters
        if self.retention is not None:
            total += self.retention.counters
        if self.costs is not None:
            total.update(self.costs.counts())
        total["expired_blocks"] += self.host.expired_blocks
        return {"evicted_blocks": self.host.evicted_blocks, **+total}

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold. O(slots)."""
        self.host.check_integrity()
        if self.read_buffer is not None:
            self.read_buffer.check_integrity()
        assert self.capture.staged_slots() <= self.host.staged_slots

    def _watched(self, lane: Lane) -> CostWatch | None:
        """What is seen of the costs; None where there are none to correct, or no clock."""
        timer = timer_for(lane)
        if self.costs is None or timer is None:
            return None
        watch = CostWatch(self.costs, self.layout.plan, timer, lane)
        self.gate.watch = watch
        if self.disk is not None:
            self.disk.on_read = watch.read
        return watch

    def _finish_pass(self) -> None:
        index = self.gate.current
        restorations = self.gate.finish()
        if not restorations:
            return
        for release in self._running.pop(index):
            release()
        self._releasing.append((self._lane.mark(), restorations))
        self.poll()
