"""Ends under random work: a slot has one owner, and a path goes on only where all is there."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_hc.policy.ends import Stay
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.ends import EndPart, Ends
from support.ends_world import STATE, WINDOW
from support.examples import examples
from support.host import host_tier, keep, tokens_of


class EndsMachine(RuleBasedStateMachine):
    """`written` says whose bytes were written to a slot last: a match may name no other."""

    LAYOUT, SLOTS, END_SLOTS = WINDOW, 9, 5

    def __init__(self) -> None:
        super().__init__()
        self.host = host_tier(self.SLOTS)
        self.ends = Ends(self.LAYOUT, self.END_SLOTS, self.host, LruPolicy())
        self.written: dict[int, bytes] = {}
        self.fresh: list[EndPart] = []
        self.read: list[tuple[EndPart, int]] = []
        self.staged: list[int] = []

    def some_node(self, which: int) -> BlockNode | None:
        nodes = sorted(self.host.tree.nodes(), key=lambda node: node.slot)
        return nodes[which % len(nodes)] if nodes else None

    @rule(word=st.text("ab", min_size=1, max_size=5))
    def publish(self, word: str) -> None:
        keep(self.host, tokens_of(word))

    @rule(which=st.integers(0, 9), own=st.booleans(), stay=st.sampled_from(Stay))
    def begin(self, which: int, own: bool, stay: Stay) -> None:
        node = self.some_node(which)
        if node is None:
            return
        path = node.path()
        number = len(path) - 1
        staged = {number: self.staged[-1]} if own and self.staged else {}
        parts = self.ends.begin(path, staged, stay=stay)
        if parts is None:
            return
        assert self.ends.has(node)
        self.fresh += parts
        if staged and any(part.slot == self.staged[-1] for part in parts):
            self.staged.pop()
        taken = {part.slot for part in parts}
        assert taken.isdisjoint(slot for _, slot in self.read), "a slot that is read"
        for slot in taken:
            self.written.pop(slot, None)

    @precondition(lambda self: self.fresh)
    @rule(which=st.integers(0, 9), good=st.booleans())
    def answer(self, which: int, good: bool) -> None:
        part = self.fresh.pop(which % len(self.fresh))
        assert part.slot >= 0, "a slot has left its writer"
        if good:
            self.written[part.slot] = part.node.block_id
            self.ends.written(part)
        else:
            self.ends.failed(part)

    @rule(which=st.integers(0, 9))
    def read_end(self, which: int) -> None:
        node = self.some_node(which)
        if node is not None:
            path = node.path()
            parts = self.ends.parts(path, self.ends.deepest(path))
            self.ends.pin(parts)
            if parts:
                self.ends.used(parts[-1].node)
            self.read += [(part, part.slot) for part in parts]

    @precondition(lambda self: self.read)
    @rule(which=st.integers(0, 9))
    def read_over(self, which: int) -> None:
        part, slot = self.read.pop(which % len(self.read))
        assert part.slot == slot and self.written[slot] == part.node.block_id
        self.ends.unpin((part,))

    @rule()
    def stage(self) -> None:
        slot = self.ends.stage()
        if slot is not None:
            self.staged.append(slot)

    @precondition(lambda self: self.staged)
    @rule()
    def unstage(self) -> None:
        self.ends.unstage(self.staged.pop())

    @rule(count=st.integers(0, 3))
    def evict_blocks(self, count: int) -> None:
        self.host.evict(count, 0.0)

    @rule(which=st.integers(0, 9))
    def drop_branch(self, which: int) -> None:
        node = self.some_node(which)
        if node is not None:
            self.host.drop_branch(node)

    @rule()
    def clear(self) -> None:
        self.host.clear()

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.host.check_integrity()
        self.ends.check_integrity()
        assert self.ends.staged_slots == len(self.staged)

    @invariant()
    def a_match_names_only_ends_whose_parts_are_there(self) -> None:
        for node in self.host.tree.nodes():
            path = node.path()
            count = self.ends.deepest(path)
            for part in self.ends.parts(path, count):
                assert self.written[part.slot] == part.node.block_id
            for more in range(count + 1, len(path) + 1):
                needed = path[max(0, more - self.LAYOUT.blocks) : more]
                assert not all(one.end is not None and one.end.ready for one in needed)


class StatesMachine(EndsMachine):
    LAYOUT, END_SLOTS = STATE, 3


TestEnds = EndsMachine.TestCase
TestEnds.settings = settings(max_examples=examples(150), stateful_step_count=30, deadline=None)
TestStates = StatesMachine.TestCase
TestStates.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)
