"""Slots of one pool of host memory, each with exactly one owner.

    free -> staged (somebody writes it) -> held (by what it stands for) -> free

Which slot holds what is the business of `host_tier.HostTier` and `ends.Ends`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar


class Owner(Protocol):
    """What holds a slot, -1 when it has given it back. pins: so many keep the slot from it."""

    slot: int
    pins: int


AnOwner = TypeVar("AnOwner", bound=Owner)


class Slots(Generic[AnOwner]):
    """damaged: slots whose bytes could not be written: not served until they are staged anew."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._staged: set[int] = set()
        self._withheld: Counter[int] = Counter()
        """Slots by how many operations that were given up may still touch them."""
        self._ownerless: set[int] = set()
        """Of these the ones that would be free."""
        self.detached: set[AnOwner] = set()
        """Owners that are gone, until their last pin ends."""
        self.damaged: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def staged(self) -> int:
        return len(self._staged)

    @property
    def withheld(self) -> int:
        return len(self._withheld)

    def is_staged(self, slot: int) -> bool:
        return slot in self._staged

    def stage(self) -> int:
        """A free slot to write into. Raises IndexError where none is free."""
        slot = self._free.pop()
        self._staged.add(slot)
        self.damaged.discard(slot)
        return slot

    def unstage(self, slot: int) -> None:
        """Give a staged slot back unused. Its bytes must have no writer any more."""
        self.hold(slot)
        self.release(slot)

    def hold(self, slot: int) -> None:
        """What a staged slot stands for owns it from now on."""
        self._staged.remove(slot)

    def release(self, slot: int) -> None:
        """The owner of a held slot gives it back."""
        if slot in self._withheld:
            self._ownerless.add(slot)
        else:
            self._free.append(slot)

    def pin(self, owners: Iterable[AnOwner]) -> None:
        """Keep their slots from being evicted or used again until `unpin`."""
        for owner in owners:
            owner.pins += 1

    def unpin(self, owners: Iterable[AnOwner]) -> None:
        for owner in owners:
            if owner.pins < 1:
                raise RuntimeError("unpin of what is not pinned")
            owner.pins -= 1
            if owner.pins == 0 and owner in self.detached:
                self.detached.remove(owner)
                self.retire(owner)

    def retire(self, owner: AnOwner) -> None:
        """An owner is gone. Its slot is free at once, or when its last pin ends."""
        if owner.pins:
            self.detached.add(owner)
        else:
            self.release(owner.slot)
            owner.slot = -1

    def withhold(self, slots: Iterable[int]) -> None:
        """An operation on these slots was given up, but may touch them at any later time. Whoever
        owns them keeps them; nobody gets them afterwards before `give_back`."""
        self._withheld.update(slots)

    def give_back(self, slots: Iterable[int]) -> None:
        """Such an operation is over after all."""
        for slot in slots:
            self._withheld[slot] -= 1
            if not self._withheld[slot]:
                del self._withheld[slot]
                if slot in self._ownerless:
                    self._ownerless.remove(slot)
                    self._free.append(slot)

    def check_integrity(self, owners: Iterable[AnOwner]) -> None:
        """Raise AssertionError unless every slot has exactly one owner: one of these, or of those
        that are gone. O(slots)."""
        held = [owner.slot for owner in (*owners, *self.detached)]
        slots = [*self._free, *self._staged, *self._ownerless, *held]
        assert sorted(slots) == list(range(self.count)), "a slot has no owner or two"
        assert all(owner.pins > 0 for owner in self.detached)
