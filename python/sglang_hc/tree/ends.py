"""Ends: where a path can be continued by a model whose layers do not all have full attention.

Such a layer keeps nothing in a block's slot. It needs something else to go on behind a block: K and
V of the last tokens (a sliding window), or its state at that place (a recurrent layer). Both are in
end parts (`forms.EndLayout`), which blocks have beside their slots, in a pool of their own:

    end part:   staged -> attached to its block, not ready -> ready -> free

An end is a block behind which a path is meant to be continued. It needs the end parts of the last
`EndLayout.blocks` blocks up to its own, which ends close to each other share. A part is there as
long as an end needs it and its block is in the tree. A path can be continued behind each block
whose parts are all ready (`deepest`), by whichever ends they were kept.

When slots run out, ends leave first that are outlived: the path has a later end, or whoever made it
has left it (`Stay`). Then those that the eviction policy names. Metadata only: whoever begins an
end writes the bytes of its parts, and says when they are in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from sglang_hc.forms import EndLayout
from sglang_hc.policy.ends import Stay
from sglang_hc.policy.eviction import EvictionPolicy, IsProtected
from sglang_hc.policy.pins import PINNED_SHARE
from sglang_hc.tree.block_tree import BlockNode, EndPart
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.slots import Slots

__all__ = ["End", "EndPart", "Ends"]

LOOKED_AT = 64
"""Outlived ends of which so many are looked at for one slot."""


LEAVING = 64
"""Prompts for which it counts that one before them has left the reply to its conversation."""


class End:
    """A block behind which its path is meant to be continued. What an eviction policy sees of it is
    that of a block without others above or below it.

    parts: all that it needs, in path order. stay: how long it is worth them.
    """

    __slots__ = ("block_id", "node", "parts", "stay")

    parent = None
    is_leaf = True

    def __init__(self, node: BlockNode, stay: Stay) -> None:
        self.node = node
        self.stay = stay
        self.block_id = node.block_id
        self.parts: list[EndPart] = []

    @property
    def num_tokens(self) -> int:
        return self.node.num_tokens

    @property
    def pins(self) -> int:
        return sum(part.pins for part in self.parts)


class Ends:
    """Slots of the pool of end parts, and the ends of one host tier's paths.

    Not thread-safe: the scheduler thread owns it. Moves no bytes. `evicted` counts ends.
    """

    def __init__(
        self,
        layout: EndLayout,
        num_slots: int,
        host: HostTier,
        policy: EvictionPolicy[End],
        next_use: Callable[[bytes], float | None] = lambda block_id: None,
    ) -> None:
        """next_use: rank of the first waiting request that needs a block, smaller is sooner; None
        for nobody."""
        if num_slots < layout.blocks:
            raise ValueError(f"an end needs {layout.blocks} slots, got {num_slots}")
        self.layout = layout
        self.num_slots = num_slots
        self._next_use = next_use
        self.on_ready: Callable[[EndPart], object] = lambda part: None
        """Told of every part whose bytes are in its slot."""
        self._slots = Slots[EndPart](num_slots)
        self.withhold, self.give_back = self._slots.withhold, self._slots.give_back
        self.pin, self.unpin = self._slots.pin, self._slots.unpin
        self.unstage = self._slots.unstage
        self._policy = policy
        self._ends: dict[BlockNode, End] = {}
        self._outlived: dict[End, BlockNode | None] = {}
        """Ends that are not worth their bytes any more, by what came after them: a later end, or
        another path; the longest outlived first."""
        self._leaving = 0
        """For so many prompts more it counts that one has left the path of its conversation."""
        self.evicted = 0
        host.on_end_gone = self._block_gone

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def staged_slots(self) -> int:
        return self._slots.staged

    def has(self, node: BlockNode) -> bool:
        """Whether a path is meant to be continued behind this block."""
        return node in self._ends

    # -- look up ---------------------------------------------------------------------------------

    def deepest(self, path: Sequence[BlockNode]) -> int:
        """How many first blocks of a path there are up to the last one behind which the path can be
        continued now; 0 for none. path: whole blocks that are ready, from the first one on."""
        last, reach = len(path), self.layout.blocks
        for index in range(len(path) - 1, -1, -1):
            part = path[index].end
            if part is None or not part.ready:
                last = index
            elif last - index == reach:
                break
        return last

    def parts(self, path: Sequence[BlockNode], count: int) -> list[EndPart]:
        """What has to be restored to continue a path behind its first `count` blocks, which
        `deepest` has named: parts of consecutive blocks, the last of them that of the end."""
        found = [node.end for node in path[self._first(count) : count]]
        assert all(part is not None and part.ready for part in found)
        return [part for part in found if part is not None]

    def used(self, node: BlockNode) -> None:
        """A path was continued behind this block."""
        end = self._ends.get(node)
        if end is not None:
            self._policy.access([end])
            self._outlived.pop(end, None)

    def prefer(self, made: Callable[[str | None], bool]) -> None:
        """As `HostTier.prefer`."""
        self._policy.outdate(lambda end: not made(end.node.namespace))

    # -- make ------------------------------------------------------------------------------------

    def stage(self, is_protected: IsProtected[End] | None = None) -> int | None:
        """A slot to write into, evicting if none is free; None where all that could leave is in use
        or protected. It is the caller's until `begin` takes it, or `unstage`."""
        if not self._slots.free and not self._evict(is_protected):
            return None
        return self._slots.stage()

    def begin(
        self,
        path: Sequence[BlockNode],
        staged: Mapping[int, int] | None = None,
        is_protected: IsProtected[End] | None = None,
        *,
        stay: Stay = Stay.REPLY,
    ) -> list[EndPart] | None:
        """The last block of a path is to be an end. path: whole blocks of the tree, from the first
        one on.

        Returns the parts that the end lacks, in path order, which may be none: each is pinned, and
        the caller writes all bytes of its slot and then calls `written` or `failed`. staged: slots
        to be taken, by the numbers of their blocks; one whose block has a part already stays the
        caller's. None where there is no room; the staged slots stay the caller's then.
        """
        node = path[-1]
        assert node.is_full and node.parent is not None
        known = self._ends.get(node)
        if known is not None:
            self._worth(known, stay)
            self._policy.access([known])
            return []
        first, end = self._first(len(path)), End(node, stay)
        for one in path[first:]:
            if one.end is not None:
                one.end.ends[end] = None  # stays while room is made for the others
        fresh = {n: -1 for n in range(first, len(path)) if path[n].end is None}
        self._outlive(end)
        if not self._fill(fresh, staged or {}, is_protected, node):
            for one in path[first:]:
                if one.end is not None:
                    self._leave(one.end, end)
            return None
        for number, slot in fresh.items():
            part = path[number].end = EndPart(path[number], slot)
            part.pins = 1
            part.ends[end] = None
        end.parts = [one.end for one in path[first:] if one.end is not None]
        self._ends[node] = end
        self._policy.insert(end)
        return [part for part in end.parts if part.slot in fresh.values()]

    def written(self, part: EndPart) -> None:
        """All bytes of a part that `begin` gave out are in its slot."""
        if part.ends:
            part.ready = True
            self.on_ready(part)
        self.unpin((part,))

    def failed(self, part: EndPart) -> None:
        """A part's bytes will not come, and nobody writes its slot any more. Its ends leave."""
        self._drop_all(part)
        self.unpin((part,))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner, and every end all its
        parts. O(slots)."""
        parts = {part for end in self._ends.values() for part in end.parts}
        self._slots.check_integrity(parts)
        assert not any(part.ends for part in self._slots.detached)
        for part in parts:
            assert part.node.end is part and part.node.parent is not None
            assert part.ready or part.pins
        for node, end in self._ends.items():
            path = node.path()
            assert [part.node for part in end.parts] == path[self._first(len(path)) :]
            assert all(end in part.ends for part in end.parts)
        assert sum(len(part.ends) for part in parts) == sum(
            len(end.parts) for end in self._ends.values()
        )
        assert len(self._policy) == len(self._ends) and self._outlived.keys() <= {
            *self._ends.values()
        }

    # -- inner parts -----------------------------------------------------------------------------

    def _first(self, count: int) -> int:
        """Number of the first block whose part is needed behind `count` blocks."""
        return max(0, count - self.layout.blocks)

    def _fill(
        self, fresh: dict[int, int], staged: Mapping[int, int],
        is_protected: IsProtected[End] | None, node: BlockNode,
    ) -> bool:  # fmt: skip
        """Give each of these numbers of blocks a slot. False, and none has one, where there is no
        room. node: the end to be."""
        own: list[int] = []
        for number in fresh:
            slot = staged.get(number)
            if slot is None:
                if not self._slots.free and not self._evict(is_protected, node):
                    for one in own:
                        self.unstage(one)
                    return False
                slot = self._slots.stage()
                own.append(slot)
            fresh[number] = slot
        for slot in fresh.values():
            self._slots.hold(slot)
        return True

    def _outlive(self, end: End) -> None:
        """What is not worth its bytes any more when this becomes an end of its path: the one before
        it; and, where the path leaves another one behind that, the ends of that one. Where several
        paths go on, they are not of one conversation."""
        below, above = end.node, end.node.parent
        while above is not None and above not in self._ends:
            below, above = above, above.parent
        left = [child for child in (above.children if above else None) or () if child is not below]
        before = None if above is None else self._ends[above]
        if before is not None and len(left) > 1:
            self._worth(before, Stay.SHARED)
        if before is None or before.stay is Stay.SHARED:
            if end.stay is Stay.PROMPT and self._leaving:
                end.stay = Stay.LASTING  # the first prompt of a conversation, as others are
            return
        if end.stay is Stay.PROMPT:
            self._leaving = LEAVING if left else max(0, self._leaving - 1)
            if left:
                end.stay = Stay.LASTING
        if before.stay < Stay.LASTING or end.stay >= Stay.LASTING:
            self._outlived[before] = end.node
        while len(left) == 1:  # where it branches it is not of one conversation either
            found = self._ends.get(left[0])
            if found is not None:
                self._outlived[found] = None
            left = left[0].children or []

    def _worth(self, end: End, stay: Stay) -> None:
        """An end is worth its bytes so long at least."""
        end.stay = max(end.stay, stay)
        if end.stay is Stay.SHARED:
            self._outlived.pop(end, None)

    def _evict(
        self, is_protected: IsProtected[End] | None, coming: BlockNode | None = None
    ) -> bool:
        """Have ends leave until a slot is free. coming: a block that is about to become an end.
        False where all that could leave is in use or protected."""
        for end in self._victims(is_protected, coming):
            self._drop(end)
            self.evicted += 1
            if self._slots.free:
                return True
        return False

    def _victims(
        self, is_protected: IsProtected[End] | None, coming: BlockNode | None
    ) -> Iterator[End]:
        for end, later in list(islice(self._outlived.items(), LOOKED_AT)):
            if later is not None and later is not coming and later not in self._ends:
                del self._outlived[end]
            elif not end.pins and self._may_leave(end, later):
                yield end
        for end in self._beyond_share():
            if not end.pins and (is_protected is None or not is_protected(end)):
                yield end
        policy = self._policy
        for end in policy.victims():
            if is_protected is None or not is_protected(end) or policy.is_outdated(end):
                yield end
            elif policy.by_need:
                return

    def _beyond_share(self) -> list[End]:
        """Ends that sessions pin beyond PINNED_SHARE of the slots, the newest first, as far as
        nobody waits for them: many short paths have more ends than their blocks say."""
        if not self._policy.has_pins:
            return []
        most = int(PINNED_SHARE * self.num_slots) // self.layout.blocks
        pinned = [end for end in self._ends.values() if self._policy.is_pinned(end)]
        return [end for end in pinned[most:][::-1] if self._next_use(end.block_id) is None]

    def _may_leave(self, end: End, later: BlockNode | None) -> bool:
        """Whether nobody waits to continue behind this end who could not do so further on."""
        use = self._next_use(end.block_id)
        if later is None:
            return use is None and not self._policy.is_pinned(end)
        if use is None:
            return True
        later_use = self._next_use(later.block_id)
        return later_use is not None and later_use <= use

    def _block_gone(self, node: BlockNode) -> None:
        """A block with an end part has left the tree."""
        assert node.end is not None
        self._drop_all(node.end)

    def _drop_all(self, part: EndPart) -> None:
        """The ends that need a part leave."""
        for end in list(part.ends):
            self._drop(end)

    def _drop(self, end: End) -> None:
        del self._ends[end.node]
        self._policy.remove(end)
        self._outlived.pop(end, None)
        for part in end.parts:
            self._leave(part, end)

    def _leave(self, part: EndPart, end: End) -> None:
        """An end needs a part no more. A part that no end needs leaves its block."""
        del part.ends[end]
        if part.ends:
            return
        part.node.end = None
        part.ready = False
        self._slots.retire(part)
