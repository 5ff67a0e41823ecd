"""Ranks that serve: rank 0's decisions ride in the stream of requests.

Each rank votes at the beginning of every pass. Rank 0 puts what it has to tell in front of the
requests that it has received, SGLang brings these to all ranks, and every rank applies the
decisions before it handles the requests. So they cost no collective of their own, and a pass
without news is as long as it was (`ranks.agreement`).

To the tensor-parallel ranks of a stage SGLang broadcasts the requests of a pass, before anybody
handles them. To the next stage of a pipeline it sends them when they have been handled. Ranks wait
for each other's votes while they handle a request that clears the cache; so here each stage sends
them on as soon as it has them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import Any

from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver
from sglang.utils import TypeBasedDispatcher

from sglang_hc.config import ConfigError
from sglang_hc.ranks.agreement import ALONE, Agreement, Decisions, Ranks
from sglang_hc.ranks.board import CompletionBoard
from sglang_hc.srt.binding import parallel
from sglang_hc.srt.engine.guard import tree_of
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.tiers.tiers import Tiers


def ranks_of(group: StartGroup) -> Ranks:
    """The ranks of a group, which begin to agree here. A collective. Raises ConfigError."""
    if group.size == 1:
        return ALONE
    own = CompletionBoard.create(group.size) if group.rank == 0 else None
    name, now = group.first(lambda: (own.name if own is not None else "", time.monotonic()))
    wrong, board = None, own
    if board is None:
        try:
            board = CompletionBoard.attach(name, group.rank, group.size)
        except OSError as error:
            wrong = f"rank {group.rank} cannot map the memory that rank 0 shares with it ({error})"
    wrong = group.reason(wrong)
    if wrong is not None:
        raise ConfigError(
            f"--tp-size or --pp-size above 1: {wrong}; all ranks must be on one node and run as "
            "one user. Add --hc-disable to serve without the tiers"
        )
    assert board is not None
    return Agreement(board, now)


class NextStage:
    """Where the requests of a pass go from here; nowhere from the last stage of a pipeline."""

    def __init__(self, scheduler: Any) -> None:
        """Sends in place of the scheduler, which keeps what is being sent until it is there."""
        self._send = scheduler._pp_send_pyobj_to_next_stage
        self._is_last = parallel.pp_rank() == parallel.pp_size() - 1
        self.sent: list[Any] = []
        if not self._is_last:
            scheduler._pp_send_pyobj_to_next_stage = self._take_sent

    def send(self, requests: list[Any]) -> None:
        if not self._is_last:
            self.sent += self._send(requests, async_send=True)

    def _take_sent(self, requests: list[Any], async_send: bool) -> list[Any]:
        sent, self.sent = self.sent, []
        return sent


@dataclass(kw_only=True, frozen=True)
class VotingReceiver(SchedulerRequestReceiver):
    """SGLang's receiver, with what the ranks have to tell each other in front of the requests."""

    tiers: Tiers
    ranks: Agreement
    next_stage: NextStage

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        requests: list[Any] = super().recv_requests(local_reqs)
        self.next_stage.send(requests)
        return requests

    def _pull_raw_reqs(self) -> list[Any] | None:
        self.ranks.begin_pass()
        self.ranks.publish_counts(self.tiers.counts)
        requests: list[Any] | None = super()._pull_raw_reqs()
        if self.ranks.rank != 0:
            return requests
        assert requests is not None
        decisions = self.ranks.decisions(self.tiers.patience(), requests=bool(requests))
        return requests if decisions is None else [decisions, *requests]


def attach(scheduler: Any) -> None:
    """A scheduler is complete: if it is one of several ranks, it takes part from now on."""
    tree = tree_of(scheduler)
    ranks = tree.tiers.ranks if tree is not None else ALONE
    if not isinstance(ranks, Agreement):
        return
    before = scheduler.request_receiver
    same = {field.name: getattr(before, field.name) for field in fields(before)}
    scheduler.request_receiver = VotingReceiver(
        **same, tiers=tree.tiers, ranks=ranks, next_stage=NextStage(scheduler)
    )
    scheduler._request_dispatcher += TypeBasedDispatcher([(Decisions, ranks.apply)])
