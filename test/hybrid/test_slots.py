"""Free slots of two kinds: none is lost, none is refused, and requests get both kinds evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_hc.hybrid.slots import FreeSlots
from sglang_hc.policy.streaming import Streaming
from support.examples import examples


def slots_of(tokens: int, act: int) -> FreeSlots:
    return FreeSlots(Streaming(tokens, act, 0, 1))


class Slots(RuleBasedStateMachine):
    """What is taken and given back in any order."""

    TOKENS, ACT = 40, 13

    def __init__(self) -> None:
        super().__init__()
        self.slots = slots_of(self.TOKENS, self.ACT)
        self.taken: list[int] = []

    @rule(count=st.integers(0, 45))
    def take(self, count: int) -> None:
        free = self.slots.count
        found = self.slots.take(count)
        assert (found is None) == (count > free), "None while a slot is free ends the server"
        if found is not None:
            assert len(found) == count
            self.taken += found.tolist()

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if self.taken else []
        self.slots.give_back(np.array(chosen, dtype=np.int64))
        self.taken = [one for one in self.taken if one not in chosen]

    @invariant()
    def each_slot_has_one_owner(self) -> None:
        free = self.slots.all().tolist()
        assert sorted([*free, *self.taken]) == list(range(1, self.TOKENS + 1))
        assert self.slots.count == len(free)
        assert self.slots.act == sum(one <= self.ACT for one in free)

    def teardown(self) -> None:
        """Idle: both kinds add up."""
        self.slots.give_back(np.array(self.taken, dtype=np.int64))
        assert (self.slots.act, self.slots.kv) == (self.ACT, self.TOKENS - self.ACT)


Slots.TestCase.settings = settings(max_examples=examples(60), deadline=None)
TestSlots = Slots.TestCase


@settings(max_examples=examples(40), deadline=None)
@given(st.floats(0, 1), st.integers(1, 60), st.integers(1, 200))
@example(0.25, 4, 134)
@example(0.25, 4, 20_000)
def test_a_request_that_gets_one_slot_in_each_pass_gets_both_kinds_evenly(
    share: float, requests: int, passes: int
) -> None:
    """However many requests decode at once, and whatever the share."""
    tokens = 2 * requests * passes
    act = round(share * tokens)
    slots = slots_of(tokens, act)
    steps = np.array([slots.take(requests) for _ in range(passes)])
    of_each = (steps <= act).sum(axis=0)
    assert abs(of_each - passes * act / tokens).max() <= 3 + 2 * np.log2(passes)


@settings(max_examples=examples(40), deadline=None)
@given(st.floats(0, 1), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_each_prompt_of_a_batch_gets_both_kinds_evenly(share: float, prompts: list[int]) -> None:
    tokens = 2 * sum(prompts)
    act = round(share * tokens)
    found = slots_of(tokens, act).take(sum(prompts))
    assert found is not None
    for part in np.split(found, np.cumsum(prompts)[:-1]):
        assert abs((part <= act).sum() - len(part) * act / tokens) <= 5


def test_the_lowest_come_first_and_the_other_kind_when_one_is_used_up() -> None:
    slots = slots_of(10, 5)
    first = slots.take(4)
    assert first is not None and sorted(first) == [1, 2, 6, 7]
    slots.give_back(np.array([6, 7]))
    again = slots.take(8)
    assert again is not None and sorted(again) == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize("wrong", [[1], [2, 2], [0], [11]])
def test_what_is_free_or_is_no_slot_is_not_given_back(wrong: list[int]) -> None:
    slots = slots_of(10, 5)
    assert slots.take(10) is not None
    slots.give_back(np.array([1]))
    with pytest.raises(ValueError, match=r"twice|no such slot"):
        slots.give_back(np.array(wrong))
