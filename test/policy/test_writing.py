"""What `--hc-write` lets through."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.errors import ConfigError
from sglang_hc.policy import writing
from sglang_hc.policy.writing import (
    BURST_S,
    DAY_S,
    ENOUGH,
    EVIDENCE,
    SAMPLED,
    SeenBlocks,
    WriteAdmission,
    WriteRule,
    names_of,
)

BLOCK = 1000


def blocks(count: int, seed: int = 0, *, sampled: bool | None = None) -> list[bytes]:
    """Identities; sampled: all of them in the sample, or none; None for what chance gives."""
    rng = random.Random(seed)
    found = [rng.randbytes(16) for _ in range(count)]
    if sampled is None:
        return found
    return [bytes([SAMPLED * (name[0] // SAMPLED) + (not sampled)]) + name[1:] for name in found]


def second_use() -> WriteAdmission:
    return WriteAdmission(WriteRule(), BLOCK, 0.0)


@pytest.mark.parametrize(
    ("text", "rule"),
    [("all", None), ("second-use", WriteRule()), ("2e12", WriteRule(2e12)), ("1", WriteRule(1.0))],
)
def test_a_rule_is_a_word_or_a_budget(text: str, rule: WriteRule | None) -> None:
    assert WriteRule.parse(text) == rule


@pytest.mark.parametrize("text", ["", "some", "0", "-5", "inf", "nan", "1TB"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be all, second-use, or bytes a day above 0"):
        WriteRule.parse(text)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 9))
def test_what_is_used_again_is_written_and_nothing_else(known: int, new: int, seed: int) -> None:
    path, admission = blocks(known + new, seed, sampled=False), second_use()
    assert admission.used(path[:known], 0.0) == 0
    assert admission.used(path, 0.0) == known
    assert admission.used(path, 0.0) == known + new
    assert admission.used(blocks(50, seed + 10), 0.0) == 0


def test_of_a_load_without_reuse_next_to_nothing_is_written() -> None:
    admission = second_use()
    load = blocks(100_000)
    written = sum(admission.used(load[at : at + 100], 0.0) for at in range(0, len(load), 100))
    assert written <= 100


@pytest.mark.parametrize(("again", "writes"), [(EVIDENCE - 1, False), (EVIDENCE, True)])
def test_new_blocks_wait_for_evidence(again: int, writes: bool) -> None:
    admission, path = second_use(), blocks(EVIDENCE, sampled=True)
    for name in path:
        admission.used([name], 0.0)
    for name in path[:again]:
        admission.used([name], 0.0)
    assert (admission.used(blocks(7, 1), 0.0) == 7) == writes


@pytest.mark.parametrize(("share", "writes"), [(ENOUGH * 0.9, False), (ENOUGH * 1.1, True)])
def test_new_blocks_are_written_while_enough_are_used_again(share: float, writes: bool) -> None:
    admission, begun = second_use(), blocks(1000, sampled=True)
    for name in begun:
        admission.used([name], 0.0)
    for name in begun[: int(share * len(begun))]:
        admission.used([name], 0.0)
    assert admission.worth(continues=False) == writes
    assert not admission.worth(continues=True), "nothing is known of those"


def test_what_continues_a_known_path_is_counted_apart() -> None:
    admission = second_use()
    for first, second in zip(*[iter(blocks(200, sampled=True))] * 2, strict=True):
        admission.used([first], 0.0)
        admission.used([first, second], 0.0)  # it goes on, and never again
    assert admission.worth(continues=False) and not admission.worth(continues=True)


def test_the_sample_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "REMEMBERED", 100)
    admission, chats = second_use(), blocks(100, sampled=True)
    for name in chats * 2:
        admission.used([name], 0.0)
    assert admission.worth(continues=False)
    for name in blocks(90, 1, sampled=True):
        admission.used([name], 0.0)
    assert not admission.worth(continues=False), "ten of a hundred, and fewer than evidence takes"
    assert len(admission._sample) == 100


@pytest.mark.parametrize(("later", "known"), [(1, 10), (99, 10), (190, 10), (191, 0), (400, 0)])
def test_the_newest_are_known(monkeypatch: pytest.MonkeyPatch, later: int, known: int) -> None:
    """Up to twice as many as SEEN, in steps of SEEN."""
    monkeypatch.setattr(writing, "SEEN", 100)
    seen, first = SeenBlocks(), names_of(blocks(10))
    seen.add(first)
    for name in blocks(later, 1):
        seen.add(names_of([name]))
    assert seen.leading(first) == known


def test_few_others_are_taken_for_known_ones() -> None:
    """When both fields are full: the docstring's one in a thousand."""
    rng, seen = np.random.default_rng(0), SeenBlocks()

    def drawn(count: int) -> Any:
        return rng.integers(0, 1 << 64, size=(count, 2), dtype=np.uint64)

    for _ in range(2 * writing.SEEN // 4096):
        seen.add(drawn(4096))
    assert sum(seen.leading(name) for name in drawn(20_000)[:, None]) <= 20


@given(
    st.lists(st.tuples(st.floats(0.0, BURST_S), st.integers(0, 30)), max_size=40),
    st.floats(1.0, 20.0),
)
def test_a_budget_holds(steps: list[tuple[float, int]], blocks_an_hour: float) -> None:
    """So many bytes a day, and an hour's at once."""
    rule = WriteRule(blocks_an_hour * BLOCK * DAY_S / BURST_S)
    admission, now, taken = WriteAdmission(rule, BLOCK, 0.0), 0.0, 0
    for pause, wanted in steps:
        now += pause
        taken += sum(admission.take(now) for _ in range(wanted))
        earned = rule.bytes_per_day * (now + BURST_S) / DAY_S
        assert taken * BLOCK <= earned * (1 + 1e-9)


def test_half_of_a_budget_is_for_what_is_used_again() -> None:
    admission, path = WriteAdmission(WriteRule(10 * BLOCK * 24), BLOCK, 0.0), blocks(40)
    for name in path[:6]:
        assert admission.used([name], 0.0) == (admission._left >= 5 * BLOCK)
        admission.take(0.0)
    assert admission.used(path[10:20], 0.0) == 0 and admission.used(path[10:20], 0.0) == 10
    assert [admission.take(0.0) for _ in range(5)] == [True] * 4 + [False]
    assert admission.take(360.0), "a tenth of an hour later"


def test_a_budget_that_nobody_took_from_grows_again() -> None:
    """New blocks stopped for good at half of an hour's budget, where no block was used again."""
    admission, path = WriteAdmission(WriteRule(10 * BLOCK * 24), BLOCK, 0.0), blocks(40)
    for _ in range(6):
        admission.take(0.0)
    assert admission.used(path[:20], 0.0) == 0
    assert admission.used(path[20:], 3600.0) == 20


def test_a_budget_of_less_than_a_block_an_hour_is_for_one_block_at_a_time() -> None:
    """Nothing was ever written."""
    admission = WriteAdmission(WriteRule(12 * BLOCK), BLOCK, 0.0)
    assert [admission.take(now) for now in (0.0, 3600.0, 7200.0, 7200.0)] == [
        True, False, True, False,
    ]  # fmt: skip


def test_end_parts_count_with_their_own_bytes() -> None:
    admission = WriteAdmission(WriteRule(10 * BLOCK * 24), BLOCK, 0.0, 4 * BLOCK)
    assert [admission.take(0.0, part=True) for _ in range(3)] == [True, True, False]
    assert [admission.take(0.0) for _ in range(3)] == [True, True, False]
