"""The answer to one who has state forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.outcome import Outcome
from sglang_hc.tiers.forgetting import Forgetter
from sglang_hc.tree.forgetting import Forgetting


def answer_to(*done: BlockDone) -> dict[str, Any]:
    """What is said when the tiers below host memory have answered so."""
    below: Any = SimpleNamespace(erase=lambda what, block_ids, ended: ended(done))
    answers = list[dict[str, Any]]()
    Forgetter(below).forget(Forgetting("acme"), lambda what, hidden: (5, [b"a"]), answers.append)
    (answer,) = answers
    return answer


def test_end_parts_and_blocks_of_a_tier_are_one_sum() -> None:
    parts = BlockDone(1, Outcome.OK, "disk", blocks=13)
    assert answer_to(parts, BlockDone(2, Outcome.OK, "disk", blocks=2)) == {
        "status": 200,
        "device": {"tokens": 10},
        "host": {"blocks": 2},
        "disk": {"blocks": 15, "complete": True},
        "complete": True,
    }


def test_a_tier_whose_end_parts_stay_is_not_complete() -> None:
    failed = BlockDone(1, Outcome.IO_ERROR, "disk", blocks=1)
    answer = answer_to(failed, BlockDone(2, Outcome.OK, "disk", blocks=2))
    assert answer["disk"] == {"blocks": 3, "complete": False}
    assert answer["status"] == 503 and not answer["complete"]
