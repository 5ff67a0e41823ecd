"""How the ranks of one model decide alike while they serve.

Every rank has its own scheduler, tree, tiers and I/O, and none asks another before it decides. They
stay equal because they decide from equal inputs. Requests come to all ranks in one order, by
SGLang's own broadcast; what else a decision depends on rides in that stream as `Decisions`, which
rank 0 puts in front of a pass's requests:

    the clock         of decisions stands at the last decisions' time
    ends of I/O       when every rank has voted (`pending_ops.py`)
    presence          of blocks in directories and in a remote store (`block_io.py`)
    ends on a device  are counted in passes, and waited for where that is too early

A pass in which nothing ended and nobody looks at the clock sends nothing. `ALONE` is a group of
one: everything is as its own rank sees it.

The stages of a pipeline handle a pass one after the other, so `apply` comes to a later stage later,
at the same place of its decisions. Nobody may wait for the votes of all ranks (`drain`) while a
batch is between two stages: the later one votes when it has the batch behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.ranks.block_io import AgreedBlocks
from sglang_hc.ranks.board import CompletionBoard, Kind
from sglang_hc.ranks.executor import AgreedExecutor
from sglang_hc.ranks.pending_ops import Decision, PendingOps, a_moment
from sglang_hc.store.block_io import LocalBlockIo
from sglang_hc.store.executor import Executor
from sglang_hc.store.scatter_queue import Event

TOGETHER_S = 0.05
"""What has ended may wait so long for a pass that sends something anyway."""

ENDED_SCATTERS = 2
"""So many ended scatters are told at once: each holds a snapshot buffer."""

REPORT_S = 0.5
"""What a rank counted is shown to the others so often."""

_KINDS = {
    (SourceTier.DISK, False): (Kind.BLOCK, Kind.BLOCK_LOOKUP),
    (SourceTier.REMOTE, False): (Kind.REMOTE, Kind.LOOKUP),
    (SourceTier.DISK, True): (Kind.END, Kind.END_LOOKUP),
    (SourceTier.REMOTE, True): (Kind.REMOTE_END, Kind.REMOTE_END_LOOKUP),
}
"""Reads and writes of a tier's blocks, or of its end parts, and what is asked of it."""

MARK_PASSES = 2
"""Passes after which a point on the device is taken to be reached."""


@dataclass(frozen=True, slots=True)
class Decisions:
    """What rank 0 tells all ranks at the beginning of a pass. now: seconds on rank 0's
    `time.monotonic`. ended: operations that are over. news: of each store, see
    `LocalBlockIo.changes`."""

    now: float
    ended: dict[Kind, list[Decision]] = field(default_factory=dict)
    news: dict[Kind, dict[bytes, bool]] = field(default_factory=dict)


class Ranks:
    """Who decides together with the tiers of this process: nobody, but for an `Agreement`."""

    count = 1
    """Ranks, this one included."""
    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, for whatever decides."""

    def executor(self, inner: Executor) -> Executor:
        """`inner` for scatters and copies; called once."""
        return inner

    def blocks(self, inner: LocalBlockIo, capacity: int = 0, *, ends: bool = False) -> LocalBlockIo:
        """`inner` for blocks below the host tier. capacity: blocks that fit on every rank; 0 where
        that is not known. ends: for end parts. Called once for each tier."""
        return inner

    def pause(self) -> None:
        """Called over and over while nothing can go on before blocks have moved."""
        time.sleep(0.001)

    def mark(self, event: Event) -> Event:
        """`event` for a decision that depends on whether it is done."""
        return event

    def counts(self) -> dict[str, int]:
        """What failed, by rank: `rank1_scatter_io_error` and so on."""
        return {}

    def reports(self, own: dict[str, int]) -> list[dict[str, int]]:
        """What each rank counted, by rank: of this one `own`, of others what they showed last."""
        return [own]

    def leave(self) -> None:
        """The server stops: nothing is decided in common any more."""


ALONE = Ranks()


class PassMark:
    """An event that is done some passes after it was made, whenever the device was through."""

    def __init__(self, event: Event, clock: AgreedClock) -> None:
        self._event = event
        self._clock = clock
        self._pass = clock.passes + MARK_PASSES

    def done(self) -> bool:
        if self._clock.passes < self._pass:
            return False
        self._event.wait()
        return True

    def wait(self) -> None:
        self._event.wait()
        self._pass = self._clock.passes


@dataclass
class AgreedClock:
    """now: seconds on rank 0's clock, as it told them last. passes: begun so far."""

    now: float
    passes: int = 0

    def __call__(self) -> float:
        return self.now


class Agreement(Ranks):
    """The ranks of one node as one of them sees them. Belongs to its scheduler thread."""

    def __init__(
        self,
        board: CompletionBoard,
        now: float,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[], None] = a_moment,
    ) -> None:
        """now: rank 0's time at the start, the same for all. clock: rank 0's own. wait: passes the
        time while all ranks wait for each other's votes."""
        self.clock: AgreedClock = AgreedClock(now)
        self.count = board.ranks
        self.rank = board.rank
        self._board = board
        self._own_clock = clock
        self._pending = {kind: PendingOps(board, kind, wait) for kind in Kind}
        self._executor: AgreedExecutor | None = None
        self._blocks: dict[Kind, AgreedBlocks] = {}
        self._told = now
        self._shown = -math.inf

    # -- Ranks -----------------------------------------------------------------------------------

    def executor(self, inner: Executor) -> Executor:
        self._executor = AgreedExecutor(inner, self._pending[Kind.SCATTER])
        return self._executor

    def blocks(self, inner: LocalBlockIo, capacity: int = 0, *, ends: bool = False) -> LocalBlockIo:
        kind, questions = _KINDS[inner.tier, ends]
        all_pending = self._pending[kind], self._pending[questions]
        is_first = self.rank == 0
        blocks = AgreedBlocks(inner, *all_pending, capacity, self.clock, is_first=is_first)
        self._blocks[kind] = blocks
        return blocks

    def pause(self) -> None:
        for blocks in self._blocks.values():
            blocks.drain()

    def mark(self, event: Event) -> Event:
        return PassMark(event, self.clock)

    def counts(self) -> dict[str, int]:
        return {
            f"rank{rank}_{kind.name.lower()}_{outcome.value}": count
            for kind, pending in self._pending.items()
            for (rank, outcome), count in pending.failures.items()
        }

    def reports(self, own: dict[str, int]) -> list[dict[str, int]]:
        found = self._board.reports()
        found[self.rank] = own
        return found

    def leave(self) -> None:
        for pending in self._pending.values():
            pending.leave()

    # -- a pass ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Every rank, before it takes in requests: vote."""
        self.clock.passes += 1
        if self._executor is not None:
            self._executor.vote()
        for blocks in self._blocks.values():
            blocks.vote()

    def publish_counts(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Every rank, once a pass: `counts` are shown to the others every REPORT_S."""
        now = self._own_clock()
        if now >= self._shown + REPORT_S:
            self._shown = now
            self._board.report(counts())

    def decisions(self, patience: float, *, requests: bool) -> Decisions | None:
        """For rank 0: what to tell all ranks before the requests of this pass; None for nothing.

        patience: seconds for which the clock of decisions may stand still. requests: there are
        some, so that telling costs no message.
        """
        voted_by_all = ((kind, pending.voted_by_all()) for kind, pending in self._pending.items())
        ended = {kind: list(decisions) for kind, decisions in voted_by_all if decisions}
        news = any([blocks.collect_changes() for blocks in self._blocks.values()])
        now = self._own_clock()
        asked = not ended.keys().isdisjoint(questions for _, questions in _KINDS.values())
        if asked or len(ended.get(Kind.SCATTER, ())) >= ENDED_SCATTERS:
            patience = 0.0
        elif ended or news:
            patience = min(patience, TOGETHER_S)
        if not (requests or now >= self._told + patience):
            return None
        self._told = now
        told = {kind: blocks.take_news() for kind, blocks in self._blocks.items()}
        return Decisions(now, ended, told)

    def apply(self, decisions: Decisions) -> None:
        """Every rank, in the same pass: these are the inputs of its decisions."""
        self.clock.now = decisions.now
        for kind, ended in decisions.ended.items():
            self._pending[kind].decide(ended)
        for kind, blocks in self._blocks.items():
            blocks.apply_presence(decisions.news[kind])
