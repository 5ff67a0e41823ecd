"""Scatters on several ranks: each writes its own rows, and a row is in place when it is on all."""

from __future__ import annotations

from sglang_hc.ranks.pending_ops import PendingOps
from sglang_hc.store.executor import Completion, Executor, Operation
from sglang_hc.store.outcome import Outcome


class AgreedExecutor:
    """An `Executor` that completes what the decisions say, whenever it is asked.

    inner: does this rank's part. The callers of all ranks submit the same operations in the same
    order; when a rank does so may depend on its device.
    """

    def __init__(self, inner: Executor, pending: PendingOps) -> None:
        self._inner = inner
        self._pending = pending

    def vote(self) -> None:
        """Say what this rank has done since the last call."""
        for ticket, ok, _ in self._inner.poll():
            self._pending.vote(ticket, Outcome.OK if ok else Outcome.IO_ERROR)

    def submit(self, ticket: int, operation: Operation) -> None:
        self._pending.begin(ticket, lambda: self._inner.submit(ticket, operation))

    def poll(self) -> list[Completion]:
        self.vote()
        decided = self._pending.take_decided()
        return [
            Completion(done.ticket, done.outcome is Outcome.OK, done.outcome is Outcome.STUCK)
            for done in decided
        ]

    def drain(self) -> list[Completion]:
        """As in `Executor`; all ranks come here at the same place of their decisions."""
        self._pending.drain(self.vote)
        return self.poll()

    def close(self) -> None:
        self._inner.close()
