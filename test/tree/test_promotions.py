"""Blocks on their way: any order of promotion and failure, and every slot keeps one owner."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.eviction import IsProtected
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import BlockPath, Prefix
from sglang_hc.tree.promotions import Promotion, Promotions
from support.examples import examples
from support.host import host_tier, keep, tokens_of, words_in


class World:
    def __init__(self, slots: int = 8) -> None:
        self.host = host_tier(slots)
        self.coming = Promotions(self.host)
        self.published: list[bytes] = []
        self.lost: list[bytes] = []
        self.coming.subscribe(self.published.extend, self.lost.append)

    def path(self, word: str) -> BlockPath:
        return self.host.tree.path(Prefix(None, tokens_of(word)))[1]

    def begin(
        self,
        word: str,
        first: int = 0,
        count: int | None = None,
        is_protected: IsProtected[BlockNode] | None = None,
    ) -> list[Promotion]:
        count = len(word) - first if count is None else count
        return self.coming.begin(self.path(word), first, count, 0.0, is_protected)

    def complete(self, promotions: Sequence[Promotion]) -> None:
        self.coming.complete(promotions, 1.0)

    def words(self) -> set[str]:
        self.host.check_integrity()
        return words_in(self.host.tree)


def test_what_lies_below_a_failure_is_lost_and_its_slots_come_back_with_its_bytes() -> None:
    world = World()
    a, b, c = world.begin("abc")
    world.complete([c])
    world.coming.fail(a)
    assert world.lost == [world.path("abc").block_ids[0], world.path("abc").block_ids[2]]
    assert world.host.staged_slots == 1, "b is still being written"
    assert world.begin("abx", first=2) == [], "no place below what is lost"
    world.complete([b])
    assert world.host.free_slots == 8 and world.words() == set()


def test_as_many_leading_blocks_as_find_room() -> None:
    world = World(slots=3)
    world.complete(world.begin("x"))
    promotions = world.begin("abcd", is_protected=lambda node: True)
    assert len(promotions) == 2
    world.complete(promotions)
    assert world.words() == {"x", "a", "ab"}
    assert world.begin("abcd", first=3) == [], "its parent is not there"


def test_a_block_that_was_computed_meanwhile_is_kept() -> None:
    world = World()
    a, b = world.begin("ab")
    keep(world.host, tokens_of("a"))
    world.complete([a, b])
    assert world.words() == {"a", "ab"} and world.host.free_slots == 6


WORDS = ["abc", "abd", "ax", "bc"]
steps = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "came", "came", "failed", "evict", "drop"]),
        st.integers(0, 99),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=examples(300))
@given(steps)
def test_every_block_that_began_ends_once_and_no_slot_is_lost(history: list) -> None:
    """Whatever comes first, a block joins when its parents have: it is lost only where one of them
    fails or is dropped. What it continues does not leave meanwhile."""
    world = World(slots=6)
    flying: list[Promotion] = []
    begun: list[bytes] = []
    is_troubled = False
    for action, number in history:
        if action == "begin":
            word = WORDS[number % len(WORDS)]
            path = world.path(word).block_ids
            coming = [identity in world.coming.block_ids for identity in path]
            first = next(
                (i for i, b in enumerate(path) if not world.host.has(b) and not coming[i]),
                len(path),
            )
            count = next((i for i in range(first, len(path)) if coming[i]), len(path)) - first
            promotions = world.begin(word, first, count)
            flying += promotions
            begun += [promotion.block_id for promotion in promotions]
        elif action == "came" and flying:
            take = 1 + number % len(flying)
            world.complete(flying[-take:])
            del flying[-take:]
        elif action == "failed" and flying:
            world.coming.fail(flying.pop(number % len(flying)))
            is_troubled = True
        elif action == "evict":
            world.host.evict(number % 3, 0.0)
        elif action == "drop":
            for node in list(world.host.tree.root(None).children or ())[: number % 2]:
                world.host.drop_branch(node)
                is_troubled = True
        assert not world.lost or is_troubled
        assert len(flying) <= len(world.coming) == world.host.staged_slots
        world.host.check_integrity()
    world.complete(flying)
    assert sorted(world.published + world.lost) == sorted(begun)
    assert not len(world.coming) and world.host.staged_slots == 0
    assert all(not node.pins for node in world.host.tree.nodes())
    assert world.host.free_slots + world.host.published_blocks == world.host.num_slots
