"""Whoever has something erased gets an answer, whatever the tiers do."""

from __future__ import annotations

from typing import Any

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.erasures import ERASE_S, Erasures
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import Forgetting


class TwoTiers:
    """Both answer each erasing."""

    tiers = SourceTier.DISK, SourceTier.REMOTE

    def __init__(self) -> None:
        self.asked: list[int] = []

    def erase(self, ticket: int, what: object, block_ids: object) -> None:
        self.asked.append(ticket)


def done(ticket: int, tier: str) -> BlockDone:
    return BlockDone(ticket, Outcome.OK, tier)


def test_it_begins_behind_the_writes_and_ends_with_the_last_answer() -> None:
    io: Any = TwoTiers()
    erasures, ended = Erasures(io), []
    erasures.ask(1, Forgetting("k1:a"), (), {7, 8}, 0.0, ended.append)
    erasures.go_on([8], 1.0)
    assert io.asked == []
    erasures.go_on([9], 1.0)
    assert io.asked == [1] and erasures.take(done(1, "disk"))
    erasures.go_on([], 1.0)
    assert not ended and not erasures.take(done(2, "disk")), "somebody else's"
    assert erasures.take(done(1, "remote"))
    erasures.go_on([], ERASE_S)
    assert ended == [[done(1, "disk"), done(1, "remote")]] and not len(erasures)


def test_nobody_waits_for_ever() -> None:
    io: Any = TwoTiers()
    erasures, ended = Erasures(io), []
    erasures.ask(1, None, (), set(), 10.0, ended.append)
    erasures.ask(2, Forgetting("k1:a"), (), {7}, 10.0, ended.append)
    erasures.go_on([7], 10.0)
    erasures.take(done(1, "remote"))
    erasures.go_on([7], 9.9 + ERASE_S)
    assert not ended and len(erasures) == 2
    erasures.go_on([7], 10.0 + ERASE_S)
    disk, *both = (
        BlockDone(ticket, Outcome.TIMED_OUT, tier)
        for ticket, tier in ((1, "disk"), (2, "disk"), (2, "remote"))
    )
    assert ended == [[done(1, "remote"), disk], both], "each tier that did not answer"
    assert not len(erasures) and io.asked == [1]
    assert erasures.take(done(1, "disk")), "it is nobody else's answer"
