"""The tiers below the device as one object: save, restore, account.

Everything the radix tree needs, without SGLang. Belongs to the scheduler thread; `after_pass` and
the restorer's gate are called where the model runs, which is the same thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sglang_hc.capture.capture import Capture, Segment
from sglang_hc.capture.states import StateCapture
from sglang_hc.device.exactness import Exactness
from sglang_hc.forms import BlockLayout
from sglang_hc.policy.writing import DAY_S
from sglang_hc.profile_file import CachedProfile
from sglang_hc.queue.away import AwaySessions
from sglang_hc.queue.meeting import Meetings
from sglang_hc.queue.queue_view import QueueView
from sglang_hc.queue.wished import WishedFetches
from sglang_hc.ranks.agreement import ALONE, Ranks
from sglang_hc.restore.restorer import Restorer
from sglang_hc.restore.states import StateRestorer
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tiers.residence import Residence
from sglang_hc.tiers.retention import Retention
from sglang_hc.tiers.trace import Recorder
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix

FETCHING_S = 0.005
WAITING_S = 0.05
KEEPING_S = 1.0
"""Longest that the clock of decisions stands still while a request waits for blocks or meets its
history, while one waits for its turn, and while pins or a time to live can end."""


@dataclass(eq=False)
class States:
    """What moves states of recurrent layers to and from ends."""

    capture: StateCapture
    restorer: StateRestorer


@dataclass(eq=False)
class Tiers:
    """The parts of one model's tiers. disk: what is below the host tier; None for nothing.
    exactness: what was measured at start of what comes back. ranks: who decides
    with them. own_errors: counts of what was wrong with a request, or with us, and cost reuse.
    recorder: of the load; None for none.
    profile: keeps what is learned of the costs; None where another rank or a user does. ends: of
    the host tier; None where all layers have full attention. states: what moves states of recurrent
    layers; None without them. residence: tells for KV events what is where; None without them."""

    host: HostTier
    disk: LowerTier | None
    capture: Capture
    restorer: Restorer
    queue: QueueView
    retention: Retention
    exactness: Exactness
    ranks: Ranks = ALONE
    own_errors: Counter[str] = field(default_factory=Counter)
    recorder: Recorder | None = None
    profile: CachedProfile | None = None
    ends: Ends | None = None
    states: States | None = None
    residence: Residence | None = None

    def __post_init__(self) -> None:
        self.wished = WishedFetches(self.queue.sources, self._is_kept, self.queue.counters)

    def _is_kept(self, block_id: bytes) -> bool:
        soft, priority = self.retention.soft, self.retention.priority
        return priority.next_use(block_id) is not None or soft.value(block_id) > 0

    @property
    def layout(self) -> BlockLayout:
        return self.restorer.path.pool.layout

    @property
    def meetings(self) -> Meetings:
        return self.queue.meetings

    @property
    def away(self) -> AwaySessions | None:
        """Learns how long sessions stay away; None where nobody does."""
        return self.queue.away

    @property
    def decides_alone(self) -> bool:
        """Whether no other ranks must decide alike."""
        return self.ranks.count == 1

    # -- upkeep ----------------------------------------------------------------------------------

    def used(
        self, prefix: Prefix, pin: tuple[str, float] | None = None, *, is_over: bool = True,
        session: str | None = None,
    ) -> None:  # fmt: skip
        """A request is over, or comes back later: the path of its tokens was used, wherever it came
        from. pin: the session and the seconds for which it asked to hold that. session: what its
        client calls its conversation."""
        if self.disk is not None:
            tree = self.host.tree
            nodes = tree.match(prefix).nodes
            origins = [node.moved.origin for node in nodes if node.moved is not None]
            self.disk.touch([*tree.identities(prefix), *origins])
            if is_over:
                self.disk.path_used(nodes)
            if self.disk.ends is not None:
                self.disk.ends.touch([node for node in nodes if node.is_full])
        if is_over:
            self.retention.used(prefix, session)
        if pin is not None:
            self.retention.pin_if_possible(prefix, *pin)

    def prefetch(self, path: Prefix) -> bool:
        """Bring to host memory what is below of a path. False where too much is asked for."""
        return self.wished.ask(path)

    def fetch_wished(self) -> None:
        """At the top of a pass, where all ranks see the same: begin what `prefetch` asked for."""
        self.wished.go_on()

    def after_pass(self, segments: Sequence[Segment]) -> None:
        """A forward pass was submitted: end its restorations, stage its rows."""
        if self.restorer.pass_ended():
            self.poll()
        self.capture.take_pass(segments)

    def poll(self) -> None:
        """Take in completions. Called in every scheduling pass; never waits."""
        self.capture.scatters.poll()
        if self.disk is not None:
            self.disk.poll()
        if self.residence is not None:
            self.residence.poll()
        self.retention.upkeep()
        if self.away is not None:
            self.away.upkeep()
        self.restorer.poll()
        if self.states is not None:
            self.states.restorer.poll()
        if self.profile is not None:
            self.profile.poll()

    def drain(self) -> None:
        """Wait until everything saved so far can be served; for tests and orderly stops."""
        self.capture.flush()
        self.capture.scatters.drain()
        if self.disk is not None:
            self.disk.drain()
        self.poll()

    def clear(self) -> None:
        """Forget what the host tier holds; what is on disk stays. Waits for copies under way."""
        self.restorer.run_now()
        self.drain()
        self.wished.give_up_all()
        self.retention.sessions.forget(lambda client: True)
        if self.disk is not None:
            self.disk.coming.give_up_all()
        self._let_go()
        self.host.clear()

    def begin_version(self, made: Callable[[str | None], bool]) -> None:
        """The weights are others: of what runs nothing more is saved, and what other weights made
        leaves host memory first from now on. Waits for copies under way, but for no disk. made:
        whether the weights of now made what is in a namespace."""
        self.restorer.run_now()
        self._let_go()
        if self.away is not None:
            self.away.lose_sight()
        self.host.prefer(made)
        if self.ends is not None:
            self.ends.prefer(made)

    def end_pins_of_others(self, weights: str | None) -> None:
        """Pins hold nothing any more that other weights than these have made."""
        self.retention.pins.unpin_others(weights)

    def _let_go(self) -> None:
        """Wait for copies under way, and drop what running requests have staged."""
        self.restorer.clear()
        if self.states is not None:
            self.states.restorer.clear()
        self.capture.drop_all()

    def forget(self, what: Forgetting) -> list[bytes]:
        """Forget namespaces in host memory, what comes to it and their pins included. Returns the
        blocks that were there. See `LowerTier.erase` for what is below."""
        if self.queue.promotions is not None:
            self.queue.promotions.forget(what.names)
        self.retention.forget(what.names)
        if self.away is not None:
            self.away.pauses.forget(what.names)
        return self.host.forget(what.names)

    def drop_branch(self, node: BlockNode) -> list[Prefix]:
        """Take a wrong block out of the tiers, with all that is known below it, and with copies of
        these that were moved. Returns the paths whose last blocks these were."""
        dropped, paths = {one.block_id for one in node.branch()}, []
        nodes = self.host.tree.nodes()
        copies = [one for one in nodes if one.moved is not None and one.moved.origin in dropped]
        for wrong in (node, *copies):
            if wrong.parent is None:  # below another one
                continue
            tokens = b"".join(one.tokens for one in wrong.path())
            paths.append(Prefix(wrong.namespace, tokens))
            if self.disk is not None:
                self.disk.drop_branch(wrong)
            self.host.drop_branch(wrong)
        return paths

    def close(self) -> None:
        """Orderly stop: what was computed is saved, and everything given back."""
        self.ranks.leave()
        self.drain()
        if self.disk is not None:
            self.disk.close()
        self.capture.scatters.close()
        self.restorer.path.copy_stream.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.profile is not None:
            self.profile.close()

    def check_integrity(self) -> None:
        """Raise AssertionError if an invariant does not hold. O(slots)."""
        self.host.check_integrity()
        if self.ends is not None:
            self.ends.check_integrity()
        assert self.capture.staged_slots() <= self.host.staged_slots

    # -- numbers ---------------------------------------------------------------------------------

    def patience(self) -> float:
        """Seconds for which the clock of decisions may stand still now, where several ranks have
        one (`ranks.agreement`)."""
        fetching = self.disk is not None and len(self.disk.coming) > 0
        if fetching or self.meetings.under_way:
            return FETCHING_S
        if self.queue.window.queue:
            return WAITING_S
        timed = self.retention.is_timed or self.away is not None
        return KEEPING_S if timed else math.inf

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info, with what each rank counted."""
        plan, counts = str(self.restorer.planner.plan), self.counts()
        ranks = self.ranks.reports(counts)
        shown: dict[str, object] = {} if self.decides_alone else {"ranks": ranks}
        if self.recorder is not None:
            shown |= self.recorder.stats()
        return {"layer_plan": plan, **self.exactness.stats(), **self.levels(), **counts, **shown}

    def levels(self) -> dict[str, float]:
        """Numbers that go up and down."""
        found: dict[str, float] = {
            "host_slots": self.host.num_slots,
            "host_free_slots": self.host.free_slots,
            "host_staged_slots": self.host.staged_slots,
            "host_withheld_slots": self.host.withheld_slots,
            "host_blocks": self.host.published_blocks,
            "host_bytes": self.host.num_slots * self.layout.slot_bytes,
            "restorations_under_way": self.restorer.under_way,
            "pins": len(self.retention.pins),
            "pinned_blocks": self.retention.pins.total_blocks,
            "retained_blocks": len(self.retention.soft),
            "sessions": len(self.retention.sessions),
        }
        if self.ends is not None:
            found |= {
                "ends": len(self.ends),
                "end_slots": self.ends.num_slots,
                "end_free_slots": self.ends.free_slots,
            }
        if self.disk is not None:
            found |= self.disk.levels()
            found["fetches_under_way"] = len(self.disk.coming)
            found["disk_bytes_per_day"] = self._disk_bytes(self.disk) / self._days(self.disk)
        if self.restorer.planner.costs is not None:
            found |= self.restorer.planner.costs.levels()
        return found

    def _disk_bytes(self, disk: LowerTier) -> int:
        """That this server has written to disk since its start."""
        found = disk.counters["disk_saved_blocks"] * self.layout.slot_bytes
        if self.ends is not None:
            found += disk.counters["disk_saved_end_parts"] * self.ends.layout.slot_bytes
        return found

    @staticmethod
    def _days(disk: LowerTier) -> float:
        return max(1.0, disk.now() - disk.began) / DAY_S

    def counts(self) -> dict[str, int]:
        """Numbers that only grow; one that never counted is absent."""
        total = Counter(expired_blocks=self.host.expired_blocks)
        for part in (self.restorer, self.capture, self.queue):
            total += part.counters
        if self.states is not None:
            total += self.states.capture.counters
        if self.ends is not None:
            total["evicted_ends"] += self.ends.evicted
        total += self.own_errors
        total += self.retention.counters + Counter(self.ranks.counts())
        if self.restorer.planner.costs is not None:
            total.update(self.restorer.planner.costs.counts())
        return {"evicted_blocks": self.host.evicted_blocks, **+total}
