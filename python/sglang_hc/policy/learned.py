"""The policy `learned`: as `queue`, but of what nobody waits for the least worth leaves first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from sglang_hc.policy.eviction import (
    NEEDED,
    B,
    Entry,
    Key,
    NextUse,
    PinnedBlocks,
    QueuePolicy,
    Wanted,
)
from sglang_hc.policy.owners import Owners
from sglang_hc.policy.pauses import Away, Pauses

LEARNED = "learned"
"""Its name among those of `eviction.make_policy`."""


class LearnedPolicy(QueuePolicy[B]):
    """As `queue`, but of the blocks that no waiting request needs those leave first which are worth
    least by the pauses of sessions (policy/pauses.py), and of equal ones the oldest.

    A session owns the last block that the tier has of its path (`Owners`). What nobody owns is
    worth nothing. Until enough is known the order is that of `queue`.
    """

    def __init__(
        self,
        pauses: Pauses,
        window: NextUse,
        pinned: PinnedBlocks | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        super().__init__(window, pinned, wanted)
        self.pauses = pauses
        self._owners = Owners()
        self._learned = False
        pauses.subscribe(self._worth_changed)

    def own(self, session: Away, path: Sequence[bytes]) -> None:
        """An answered session has these blocks, root first. Costs as many of them as are not
        here."""
        last = next((block_id for block_id in reversed(path) if self.has(block_id)), None)
        if last is not None:
            self._owners.assign(last, session)
            self._push_again(last)

    def serve(self, session: Away, path: Sequence[bytes]) -> None:
        """A session is served with this prompt, of whose blocks some may come. Costs as many of
        them as are here."""
        if self._owners.block_of(session) is not None:
            return
        here = sum(1 for _ in takewhile(self.has, path))
        if here < len(path):
            self._owners.expect(path[here], session)
        if here and self._owners.offer(path[here - 1], session):
            self._push_again(path[here - 1])

    def insert(self, block: B) -> None:
        parent = block.parent
        self._owners.came(block.block_id, None if parent is None else parent.block_id)
        super().insert(block)

    def remove(self, block: B) -> None:
        owner, parent = self._owners.left(block.block_id), block.parent
        if owner is not None and parent is not None and self.has(parent.block_id):
            self._owners.offer(parent.block_id, owner)
        super().remove(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless owners are of blocks that are here."""
        self._owners.check_integrity(self.has)

    def _worth_changed(self, sessions: Iterable[Away]) -> None:
        if self._learned != self.pauses.is_evident:
            self._learned = self.pauses.is_evident
            changed = self._owners.blocks()  # the keys of others are what they were
        else:
            owned = map(self._owners.block_of, sessions)
            changed = [block_id for block_id in owned if block_id is not None]
        for block_id in changed:
            self._push_again(block_id)

    def _push_again(self, block_id: bytes) -> None:
        entry = self._entries[block_id]
        if entry.block.is_leaf and block_id not in self._aside:
            self._push(entry)

    def _preferred_to(self, oldest: Entry[B]) -> Entry[B] | None:
        return None if self._learned else super()._preferred_to(oldest)

    def _key(self, entry: Entry[B]) -> Key:
        need, order = super()._key(entry)
        learned = self._learned and need < NEEDED
        return (need, self._owners.value(entry.block.block_id) if learned else 0.0, order)
