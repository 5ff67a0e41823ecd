"""Which session a block belongs to, in one tier: the last block that the tier has of its path.

When that leaves, the session owns its parent, if this has no owner of more worth. While a session
is served it owns what comes behind.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang_hc.policy.pauses import Away

EXPECTED = 4096
"""Sessions at most of which blocks are expected."""


class Owners:
    """O(1) for each call."""

    def __init__(self) -> None:
        self._owners: dict[bytes, Away] = {}
        self._owned: dict[Away, bytes] = {}
        self._expected: dict[bytes, Away] = {}
        """By the first block that the tier lacks of a path, the session that is served with it."""

    def value(self, block_id: bytes) -> float:
        """What the owner of a block is worth; 0 without one."""
        owner = self._owners.get(block_id)
        return 0.0 if owner is None else owner.value

    def block_of(self, session: Away) -> bytes | None:
        """The block that a session owns."""
        return self._owned.get(session)

    def blocks(self) -> list[bytes]:
        """Those that have an owner."""
        return list(self._owners)

    def assign(self, block_id: bytes, session: Away) -> None:
        """A session owns this block from now on, and no other; whoever owned it owns nothing."""
        before, owner = self._owned.get(session), self._owners.get(block_id)
        if before is not None:
            del self._owners[before]
        if owner is not None and owner is not session:
            del self._owned[owner]
        self._owners[block_id], self._owned[session] = session, block_id

    def offer(self, block_id: bytes, session: Away) -> bool:
        """Assign a block if its owner is worth less. Returns whether it was."""
        owner = self._owners.get(block_id)
        better = owner is None or owner.is_over or owner.value < session.value
        if better and not session.is_over:
            self.assign(block_id, session)
        return better and not session.is_over

    def expect(self, block_id: bytes, session: Away) -> None:
        """When this block comes it belongs to the session."""
        self._expected[block_id] = session
        if len(self._expected) > EXPECTED:
            del self._expected[next(iter(self._expected))]

    def came(self, block_id: bytes, parent: bytes | None) -> None:
        """A block came into the tier."""
        session = self._expected.pop(block_id, None)
        if session is None and parent is not None:
            session = self._owners.get(parent)
            if session is not None and session.kind is not None:
                return  # it is away: somebody else goes on there
        if session is not None and not session.is_over:
            self.assign(block_id, session)

    def left(self, block_id: bytes) -> Away | None:
        """A block left the tier. Returns who owned it."""
        owner = self._owners.pop(block_id, None)
        if owner is not None:
            del self._owned[owner]
        return owner

    def check_integrity(self, has: Callable[[bytes], bool]) -> None:
        """Raise AssertionError unless each owner has one block, which the tier has."""
        assert self._owned == {owner: block_id for block_id, owner in self._owners.items()}
        assert len(self._owned) == len(self._owners) and all(map(has, self._owners))
        assert len(self._expected) <= EXPECTED
