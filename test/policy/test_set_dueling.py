"""Duels between the oldest and the youngest block, and what `queue` makes of them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.eviction import EvictionPolicy
from sglang_hc.policy.set_dueling import SetDueling, bucket_of
from sglang_hc.queue.windows import LookAhead
from sglang_hc.tools.simulator.disk import DiskBlock
from sglang_hc.tools.simulator.policies import policy_named
from support.examples import examples

SLOTS = 20


class Tier:
    """Single blocks in SLOTS slots, without a queue."""

    def __init__(self, name: str, **options: bool) -> None:
        self.policy: EvictionPolicy[DiskBlock] = policy_named(name, LookAhead(), **options)
        self.blocks: dict[int, DiskBlock] = {}
        self.hits = 0

    def ask(self, number: int) -> None:
        block = self.blocks.get(number)
        if block is not None:
            self.hits += 1
            self.policy.access([block])
            return
        self.blocks[number] = block = DiskBlock(number.to_bytes(8, "big"), None, 0.0)
        self.policy.insert(block)
        if len(self.blocks) > SLOTS:
            victim = next(iter(self.policy.victims()))
            del self.blocks[int.from_bytes(victim.block_id, "big")]
            self.policy.remove(victim)


def hits(name: str, load: list[int], **options: bool) -> int:
    tier = Tier(name, **options)
    for number in load:
        tier.ask(number)
    return tier.hits


LOOP = list(range(30)) * 20


def test_over_a_loop_that_does_not_fit_a_part_of_it_stays():
    assert hits("lru", LOOP) == 0
    assert hits("queue", LOOP, disk=True) == 0
    assert hits("queue", LOOP) > 0.5 * len(LOOP) * SLOTS / 30


def test_what_has_outlived_the_loop_leaves():
    """Contents change now and then: the kept part of the old loop must not stay for ever."""
    load = [base + i for base in (0, 100, 200) for _ in range(20) for i in range(30)]
    assert hits("queue", load) > 2 * hits("queue", LOOP)


def test_after_a_loop_age_is_right_again():
    fresh = list(range(1000, 3000))  # twice each, soon after one another
    twice = [n for pair in zip(fresh, [0, 0, 0, *fresh], strict=False) for n in pair]
    alone, after = Tier("queue"), Tier("queue")
    for number in LOOP:
        after.ask(number)
    before = after.hits
    for number in twice:
        alone.ask(number)
        after.ask(number)
    assert after.hits - before > 0.95 * alone.hits


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60))
def test_without_a_loop_nothing_changes_much(seed, spread):
    """Recent blocks come back: LRU is right, and `queue` stays LRU."""
    random = Random(seed)
    load = [max(0, step - int(random.expovariate(1 / spread))) for step in range(1500)]
    assert hits("queue", load) >= hits("lru", load) - 15


def test_a_use_soon_after_the_duel_began_decides_nothing():
    duels = SetDueling()
    for number in range(64):
        duels.entered(bytes([number]), 64)
    duels.begin(b"old", 30, b"young", 64)
    duels.used(b"young", 0, 64)
    assert duels.score(30) == 0
    for number in range(8):
        duels.entered(bytes([number]), 64)
    duels.used(b"old", 0, 64)
    assert duels.score(30) > 0


names = st.integers(0, 400).map(lambda n: n.to_bytes(2, "big"))
calls = st.lists(st.tuples(st.sampled_from(["enter", "use", "begin"]), names, names), max_size=400)


@settings(max_examples=examples(60), deadline=None)
@given(calls, st.integers(1, 50))
def test_duels_stay_pairs_and_few(history, blocks):
    duels = SetDueling()
    for action, one, other in history:
        if action == "begin":
            duels.begin(one, duels.clock % 37, other, blocks)
        elif action == "enter":
            duels.entered(one, blocks)
        else:
            duels.used(one, 0, blocks)
        duels.check_integrity()


def test_buckets_grow_with_age():
    ages = [bucket_of(age) for age in range(5000)]
    assert ages == sorted(ages) and ages[-1] < 30


@pytest.mark.parametrize(
    ("wins", "again", "soon", "wins_now"),
    [
        (5, 9, 0, True),
        (4, 9, 0, False),  # a score of 0.25 is not clear
        (9, 5, 0, True),
        (9, 4, 0, False),  # too few uses to see a loop
        (9, 9, 3, True),
        (9, 9, 4, False),  # a third of them would hit in an LRU
    ],
)
def test_the_old_wins_in_a_clear_loop(wins: int, again: int, soon: int, wins_now: bool):
    """wins: duels of one age that the old one won. again: young ones that were used again, `soon`
    of them while they would still be in an LRU."""
    duels, blocks = SetDueling(), 16

    def others(count: int) -> None:
        for _ in range(count):
            duels.entered(duels.clock.to_bytes(2, "big"), blocks)

    for number in range(9):
        old, young = b"old%d" % number, b"young%d" % number
        duels.begin(old, 30 if number < wins else 5, young, blocks)
        others(2)
        if number < wins:
            duels.used(old, 0, blocks)
        if number < again:
            others(0 if number < soon else blocks)
            duels.used(young, 0, blocks)
    assert duels.old_wins(30) == wins_now


def test_uses_close_together_count_once():
    """Fewer than a sixteenth of the blocks came in or were used between them."""
    duels = SetDueling()
    for number in range(10):
        duels.entered(bytes([number]), 32)
    duels.used(b"x", 8, 32)
    assert duels.clock == 10
    duels.used(b"x", 7, 32)
    assert duels.clock == 11


def test_a_duel_begins_so_often_that_256_are_open_until_patience_ends():
    duels, blocks = SetDueling(), 25600
    duels.begin(b"old", 30, b"young", blocks)
    for number in range(8 * blocks // 256):
        assert not duels.may_begin
        duels.entered(number.to_bytes(2, "big"), blocks)
    assert duels.may_begin
