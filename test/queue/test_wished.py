"""Fetches that nobody waits for: what is below comes to host memory, and displaces nobody."""

from __future__ import annotations

from collections import Counter

from sglang_hc.policy.eviction import make_policy
from sglang_hc.policy.soft_retention import SoftRetention
from sglang_hc.queue import wished
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.wished import LOOKS, MOST_ASKED, WishedFetches
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.identity import Prefix
from support.fake_io import FakeIo
from support.host import host_tier, identities, keep, queue_over, tokens_of, words_in


class World:
    def __init__(self, slots: int = 100, below: str = "") -> None:
        self.io = FakeIo(capacity=100)
        if below:
            self.io.hold(identities(tokens_of(below)))
        self.soft, self.window = SoftRetention(100), LookAhead()
        self.host = host_tier(slots, make_policy("queue", self.window, None, self.soft))
        self.disk = LowerTier(self.io, self.host, lambda: 0.0)
        self.queue = queue_over(self.host, self.disk, self.window)
        self.counters: Counter[str] = Counter()
        self.wished = WishedFetches(self.queue.sources, self.is_kept, self.counters)

    def is_kept(self, block_id: bytes) -> bool:
        return self.window.next_use(block_id) is not None or self.soft.value(block_id) > 0

    def ask(self, word: str) -> bool:
        return self.wished.ask(Prefix(None, tokens_of(word)))

    def come(self) -> None:
        self.wished.go_on()
        while self.io.moves:
            self.io.step()
        self.disk.poll()

    def words(self) -> set[str]:
        return words_in(self.host.tree)


def test_what_is_below_comes_behind_what_is_there() -> None:
    world = World(below="abcd")
    keep(world.host, tokens_of("a"))
    assert world.ask("abcdx")
    world.come()
    assert world.words() == {"a", "ab", "abc", "abcd"} and not len(world.wished)
    assert world.counters == {"wished_fetches": 1, "wished_blocks": 3}
    assert world.ask("abcd")
    world.come()
    assert world.counters["wished_fetches"] == 1, "there already"
    assert not len(world.queue.requests), "nobody is left to wait"


def test_two_wishes_for_one_path_fetch_it_once() -> None:
    world = World(below="abcd")
    assert world.ask("ab") and world.ask("abcd")
    world.come()
    assert world.words() == {"a", "ab", "abc", "abcd"}
    assert sorted(world.io.begun) == sorted(identities(tokens_of("abcd")))


def test_it_displaces_what_nobody_wants_and_nothing_else() -> None:
    world = World(slots=4, below="abcd")
    for word in ("x", "y", "z"):
        keep(world.host, tokens_of(word))
    window, soft = world.window, world.soft
    window.update([7], 1, lambda _: identities(tokens_of("x")))
    soft.retain("t", identities(tokens_of("y")), 60, 0)
    world.ask("abcd")
    world.come()
    assert world.words() >= {"x", "y"} and "z" not in world.words()
    assert world.counters["wished_blocks"] == 2 and not len(world.wished)


def test_what_other_weights_made_makes_room_whoever_retains_it() -> None:
    world = World(slots=3, below="abcd")
    for word in ("x", "y", "z"):
        keep(world.host, tokens_of(word), "old")
        old = world.host.tree.identities(Prefix("old", tokens_of(word)))
        world.soft.retain("t", old, 60, 0)
    world.host.prefer(lambda namespace: namespace is None)
    world.ask("abcd")
    world.come()
    assert world.words() == {"a", "ab", "abc"}


def test_a_pass_looks_at_few_and_whoever_waits_for_an_answer_holds_up_nobody(monkeypatch) -> None:
    world = World(below="b")
    asked: list[bytes] = []
    unknown = identities(tokens_of("a"))

    def ask(block_ids):
        asked.extend(block_ids[:1])
        return block_ids[:1] == unknown

    monkeypatch.setattr(world.io, "ask", ask)
    for word in "a" * (3 * LOOKS) + "b":
        assert world.ask(word)
    for passes in range(1, 4):
        world.come()
        assert len(asked) == passes * LOOKS and not world.words()
    world.come()
    assert world.words() == {"b"} and len(world.wished) == 3 * LOOKS


def test_both_sides_of_the_most_that_may_be_asked_for() -> None:
    world = World()
    assert all(world.ask("ab") for _ in range(MOST_ASKED))
    assert not world.ask("ab")
    world.wished.give_up_all()
    assert world.ask("ab") and len(world.queue.requests) == 1
    world.come()
    assert not world.io.begun and not world.words()


def test_of_whom_no_answer_comes_is_looked_at_so_often_and_no_more(monkeypatch) -> None:
    monkeypatch.setattr(wished, "MOST_LOOKS", 3)
    world = World(below="a")
    monkeypatch.setattr(world.io, "ask", lambda block_ids: True)
    assert world.ask("a")
    world.come()
    world.come()
    assert len(world.wished) == 1
    world.come()
    assert not len(world.wished) and not len(world.queue.requests) and not world.words()
