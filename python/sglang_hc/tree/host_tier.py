"""The host tier's metadata: which slot holds which block, who pins it, and what leaves first.

    slot:   free -> staged (a running request writes it) -> published (a block of the tree) -> free

A slot has exactly one owner. A block leaves leaf first, because a block without its parent is
unreachable, and never while it is pinned. Which leaf goes is the eviction policy's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.policy.eviction import EvictionPolicy, IsProtected
from sglang_hc.policy.pins import TimeToLive
from sglang_hc.tree.block_tree import BlockNode, BlockTree, Insertion
from sglang_hc.tree.slots import Slots


class HostTier:
    """Slots of the host pool and the tree of blocks in them.

    Not thread-safe: the scheduler thread owns it. Moves no bytes.
    """

    def __init__(
        self,
        tree: BlockTree,
        num_slots: int,
        policy: EvictionPolicy[BlockNode],
        ttl: TimeToLive[BlockNode] | None = None,
    ) -> None:
        """ttl: blocks that nobody used for that long leave in `expire`."""
        if num_slots < 1:
            raise ValueError(f"a host tier needs at least one slot, got {num_slots}")
        self.tree = tree
        self.num_slots = num_slots
        self._policy = policy
        self.has = policy.has
        """Whether a block is in the tree; its bytes may still be on their way."""
        self._ttl = ttl
        self._next_expiry = 0.0
        self._slots = Slots[BlockNode](num_slots)
        self.damaged_slots = self._slots.damaged
        """Slots whose bytes could not be written: not served until they are staged anew."""
        self.withhold, self.give_back = self._slots.withhold, self._slots.give_back
        self.is_staged, self.unstage = self._slots.is_staged, self._slots.unstage
        self.pin, self.unpin = self._slots.pin, self._slots.unpin
        self.on_end_gone: Callable[[BlockNode], None] | None = None
        """Told of each block that leaves with an end part (`ends.Ends`)."""
        self.on_change: Callable[[BlockNode, bool], None] | None = None
        """Told of each block that joins the tree, True, or is about to leave it."""
        self.evicted_blocks = 0
        self.expired_blocks = 0

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def staged_slots(self) -> int:
        return self._slots.staged

    @property
    def has_ttl(self) -> bool:
        """Whether blocks leave when nobody uses them for long."""
        return self._ttl is not None

    @property
    def withheld_slots(self) -> int:
        return self._slots.withheld

    @property
    def published_blocks(self) -> int:
        return self.tree.num_blocks

    def stage(self, now: float, is_protected: IsProtected[BlockNode] | None = None) -> int | None:
        """A slot to write into, evicting if none is free. None: all are in use or protected."""
        if not self._slots.free and self.evict(1, now, is_protected) == 0:
            return None
        return self._slots.stage()

    def publish(
        self,
        parent: BlockNode,
        tokens: bytes,
        slot: int,
        now: float,
        identity: bytes | None = None,
    ) -> Insertion:
        """Make a staged slot a block of the tree. The slot stays staged if nothing was created.
        identity: as in `BlockTree.insert`.

        The new block is not `ready`; whoever writes its bytes calls `mark_ready`.
        """
        outcome = self.tree.insert(parent, tokens, identity)
        if outcome.created and self.on_change is not None:
            self.on_change(outcome.node, True)
        if outcome.superseded is not None:
            self._retire(outcome.superseded)
        if outcome.created:
            self._slots.hold(slot)
            node = outcome.node
            node.slot = slot
            self._policy.insert(node)
            if self._ttl is not None:
                self._ttl.touch(node, now)
        return outcome

    def mark_ready(self, node: BlockNode) -> None:
        """The slot of a published block holds all its bytes: from now on the block is served."""
        node.ready = True

    def access(self, path: Sequence[BlockNode], now: float) -> None:
        """Record a use of the blocks of one path, root first."""
        if self._ttl is not None:
            for node in path:
                self._ttl.touch(node, now)
        self._policy.access(path)

    def evict(
        self, count: int, now: float, is_protected: IsProtected[BlockNode] | None = None
    ) -> int:
        """Free up to `count` slots, best victims first, none of those `is_protected` is true for,
        but for what is outdated.

        Returns how many; 0 is always safe.
        """
        freed, policy = 0, self._policy
        if count > 0:
            for node in policy.victims():
                if is_protected and is_protected(node) and not policy.is_outdated(node):
                    if policy.by_need:
                        break
                    continue
                self.drop(node)
                freed += 1
                if freed == count:
                    break
        self.evicted_blocks += freed
        return freed

    def expire(self, now: float, is_protected: IsProtected[BlockNode] | None = None) -> int:
        """Drop the blocks whose time to live is over, ends of paths first, none of those in use or
        that `is_protected` is true for. It searches at most once a second. Returns how many."""
        if self._ttl is None or now < self._next_expiry:
            return 0
        self._next_expiry = now + min(1.0, self._ttl.ttl / 10)
        gone = 0
        for node in reversed(self._ttl.expired(now)):  # a path is used root first
            if node.is_leaf and not node.pins and not (is_protected and is_protected(node)):
                self.drop(node)
                gone += 1
        self.expired_blocks += gone
        return gone

    def drop(self, node: BlockNode) -> None:
        """Take one leaf out of the tree. Its slot is free at once, or when its last pin ends."""
        self.tree.remove(node)
        self._retire(node)

    def drop_branch(self, node: BlockNode) -> None:
        """Take a block and everything below it out of the tree, as `drop` does."""
        for one in reversed(node.branch()):
            self.drop(one)

    def forget(self, names: Callable[[str | None], bool]) -> list[bytes]:
        """Take every block out of the tree whose namespace `names` is true for, as `drop` does.
        Returns their identities."""
        nodes = list(self.tree.nodes(names))
        for node in reversed(nodes):
            self.drop(node)
        return [node.block_id for node in nodes]

    def prefer(self, made: Callable[[str | None], bool]) -> None:
        """Blocks of other namespaces than these leave first from now on."""
        self._policy.outdate(lambda node: not made(node.namespace))

    def clear(self) -> None:
        """Forget every block. Pinned slots are freed by their last `unpin`; staged ones stay."""
        nodes = list(self.tree.nodes())
        self.tree.clear()
        for node in nodes:
            self._retire(node)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot has exactly one owner. O(slots)."""
        self.tree.check_integrity()
        self._slots.check_integrity(self.tree.nodes())

    def _retire(self, node: BlockNode) -> None:
        if self.on_change is not None:
            self.on_change(node, False)
        self._policy.remove(node)
        if self._ttl is not None:
            self._ttl.forget(node)
        node.parent = None  # no longer part of the tree, even while somebody pins it
        node.ready = False
        if node.end is not None and self.on_end_gone is not None:
            self.on_end_gone(node)
        self._slots.retire(node)
