"""The restorations of one model, from admission until their blocks may leave the host tier.

    queue      at admission: the blocks are pinned, the device slots are promised
    start      before the next batch: recomputed layers are submitted, copies run ahead
    pass_ended the batch's forward pass was submitted: what it did not ask for is done, too
    poll       the copies are over: the blocks are unpinned

Blocks of a request that waits, or whose history is on its way, are restored before its pass
(`restore_early`), before anything is promised with them.

Belongs to the scheduler thread, on the compute stream.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from sglang_hc.policy.batch import Load
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import RestorePlan
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.restore.cost_observer import CostObserver
from sglang_hc.restore.path import Restoration, RestorePath
from sglang_hc.restore.restore_pass import LayerGate, RestorePass
from sglang_hc.store.scatter_queue import Event
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.host_tier import HostTier


class _Queued(NamedTuple):
    """release: called when its device slots hold the state. Its blocks are pinned."""

    restoration: Restoration
    release: Callable[[], None]


class Restorer:
    """gate: what the KV pool asks before a layer's attention reads. planner: which part of a host
    hit is restored. counters: shared with the planner."""

    def __init__(
        self,
        host: HostTier,
        path: RestorePath,
        planner: RestorePlanner,
        observer: CostObserver | None,
        counters: Counter[str],
        ranks: Ranks = ALONE,
        ends: Ends | None = None,
    ) -> None:
        """observer: sees what restorations and prefills take; None where there are no costs to
        correct. ends: of the host tier; None where all layers have full attention."""
        self._ranks = ranks
        self.path = path
        self.planner = planner
        self.observer = observer
        self.counters = counters
        self.gate = LayerGate(observer)
        self._host = host
        self._ends = ends
        self._queued: list[_Queued] = []
        self._running: dict[int, list[_Queued]] = {}
        self._releasing: deque[tuple[Event, Callable[[], None]]] = deque()

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def unqueue(self, keep: int) -> None:
        """Take back what was queued behind the first `keep` restorations."""
        while len(self._queued) > keep:
            one = self._queued.pop()
            self._unpin((one,))
            one.release()

    @property
    def under_way(self) -> int:
        """Restorations queued or running."""
        return len(self._queued) + sum(len(done) for done in self._running.values())

    def recomputed(self, plan: RestorePlan) -> int:
        """Layers of this rank that a plan recomputes: those of its layer plan, and without the
        stages of a pipeline as many more as the plan has."""
        planned = self.path.pool.layout.plan.recompute
        return planned + plan.recompute_layers - self.planner.plan.recompute

    def queue(self, restoration: Restoration, release: Callable[[], None]) -> None:
        """Restore in the next pass; `release` is called when its device slots hold the state."""
        stored_from = self.path.pool.layout.plan.recompute
        assert restoration.recompute >= stored_from, "layers that are not stored"
        self._host.pin(restoration.nodes)
        self._host.access(restoration.nodes, self._ranks.clock())
        if restoration.window is not None:
            assert self._ends is not None
            self._ends.pin(restoration.window.parts)
            self._ends.used(restoration.nodes[-1])
        self._queued.append(_Queued(restoration, release))
        self.counters["restored_tokens"] += restoration.stop - restoration.start
        self.counters["restorations"] += 1

    def start(self) -> int:
        """Begin what is queued; returns the consumer index for the next batch, -1 for nothing. Who
        recomputes more layers is decided here, by what brings the whole batch through first.

        Recomputed layers are submitted here, before the batch is put together. An error there ends
        the scheduler, as the same error in a forward pass does: the slots were promised, and nobody
        may read them.
        """
        if not self._queued:
            return -1
        queued, self._queued = self._queued, []
        restorations = [one.restoration for one in queued]
        loads = [Load(one.stop - one.start, one.start, one.recompute) for one in restorations]
        for one, layers in zip(restorations, self.planner.share(loads), strict=True):
            one.recompute = layers
            self.counters["recomputed_layer_tokens"] += (one.stop - one.start) * layers
        index = self.gate.produce(self._pass(restorations))
        self._running[index] = queued
        self.gate.recompute(index)
        return index

    def keep(self, nodes: Sequence[BlockNode]) -> None:
        """Pin blocks of the tree whose restoration has begun until the copies that were enqueued by
        now are over."""
        self._host.pin(nodes)
        self._host.access(nodes, self._ranks.clock())
        copied = self._ranks.mark(self.path.copy_stream.record())
        self._releasing.append((copied, partial(self._host.unpin, nodes)))

    def restore_early(self, restorations: Sequence[Restoration]) -> Event:
        """Submit restorations of blocks before the pass of their request, and of all their layers.
        Compute work that is submitted later finds their K and V.

        Returns a point behind the copies. Nothing is pinned here: blocks of the tree are kept until
        then with `keep`; a block that has not joined it counts only if its host slot was still its
        own at that point. After an error nothing more is written to the device slots, which nobody
        may read: they may be freed.
        """
        early = self._pass(restorations)
        try:
            early.finish()
            return self.path.copy_stream.record()
        except Exception:
            early.abandon()
            raise

    def join_early(self, tokens: int) -> None:
        """Count tokens that were restored early and now serve their request."""
        self.counters["restored_tokens"] += tokens
        self.counters["early_restored_tokens"] += tokens

    def run_now(self) -> None:
        """Run queued restorations without a pass, because their batch did not come."""
        index = self.start()
        if index >= 0:
            self.gate.set_consumer(index)
            self._finish_pass()
            self.poll()

    def prefill_begins(self, lengths: Sequence[tuple[int, int]]) -> None:
        """See `CostObserver.prefill_begins`."""
        if self.observer is not None:
            self.observer.prefill_begins(lengths)

    def pass_ended(self) -> bool:
        """A forward pass was submitted: complete its restorations. Returns whether it had any."""
        if self.observer is not None:
            self.observer.pass_ended()
        return self._finish_pass()

    def poll(self) -> None:
        """Unpin the blocks of restorations that are over. Never waits."""
        if self.observer is not None:
            self.observer.poll()
        while self._releasing and self._releasing[0][0].done():
            _, unpin = self._releasing.popleft()
            unpin()

    def clear(self) -> None:
        """Wait for the copies under way."""
        while self._releasing:
            self._releasing[0][0].wait()
            self.poll()

    def _finish_pass(self) -> bool:
        index = self.gate.current
        restorations = self.gate.finish()
        if not restorations:
            return False
        done = self._running.pop(index)
        for one in done:
            one.release()
        copied = self._ranks.mark(self.path.copy_stream.record())
        self._releasing.append((copied, partial(self._unpin, done)))
        return True

    def _unpin(self, done: Sequence[_Queued]) -> None:
        """The blocks of these restorations, and their end parts."""
        for one in done:
            self._host.unpin(one.restoration.nodes)
            if one.restoration.window is not None and self._ends is not None:
                self._ends.unpin(one.restoration.window.parts)

    def _pass(self, restorations: Sequence[Restoration]) -> RestorePass:
        rate = self.planner.kv_per_hidden(sum(r.stop - r.start for r in restorations))
        return RestorePass(self.path, restorations, rate, self.observer)
