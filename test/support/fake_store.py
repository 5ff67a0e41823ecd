"""The one remote store of the tests: moves blocks as `FakeIo` does, and answers look-ups when
told."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.host_pool import HostPool
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting
from support.fake_io import FakeIo


class FakeStoreIo(FakeIo):
    """Operations wait for `step`, look-ups and clearings for `answer`, each the oldest first."""

    name = "FakeStore"
    tier = SourceTier.REMOTE
    has_record = rests = False
    is_shared = True

    def __init__(self, pool: HostPool | None = None) -> None:
        super().__init__(pool, writes_wait=True)
        self.questions: deque[tuple[int, Sequence[bytes] | None]] = deque()
        """Tickets and identities; None to clear the store."""
        self._erasing: set[int] = set()

    def answer(self, outcome: Outcome = Outcome.OK) -> None:
        """End the oldest look-up or clearing with this outcome."""
        if not self.questions:
            return
        ticket, block_ids = self.questions.popleft()
        good = outcome is Outcome.OK
        if ticket in self._erasing and good:
            for block_id in self.held() if block_ids is None else self.held() & {*block_ids}:
                self.evict(block_id)
        leading = self.contains(block_ids) if block_ids and good else 0
        self._done.append(BlockDone(ticket, outcome, self.tier.value, None, leading))

    # -- LocalBlockIo ----------------------------------------------------------------------------

    def changes(self, *, anew: bool = False) -> Mapping[bytes, bool]:
        return {}

    def look_up(self, ticket: int, block_ids: Sequence[bytes], deadline: float) -> None:
        self.questions.append((ticket, block_ids))

    def erase(self, ticket: int, what: Forgetting | None, block_ids: Sequence[bytes]) -> None:
        self._erasing.add(ticket)
        self.questions.append((ticket, None if what is None else block_ids))
