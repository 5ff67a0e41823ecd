"""Two ranks or stages are told once to forget a tenant, and neither finds it again: on the device,
in host memory, on its own disk, also after a restart."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.core import Reply
from support.forgetting import forgotten, held_by_host
from support.prompts import on_disk
from support.ranked_core import CORES, run_ranks
from support.ranked_turns import engine

RNG = random.Random(4)
PROMPT = RNG.choices(range(3, 900), k=200)
OTHER = RNG.choices(range(3, 900), k=200)


class Left(NamedTuple):
    """What one rank has of the tenant, before and after: blocks in host memory; and replies."""

    before: int
    answer: dict[str, Any]
    device: int
    host: int
    first: Reply
    again: Reply
    theirs: Reply
    others: Reply


def leave(rank: int, port: int, *server: str) -> Left:
    core = engine(rank, port, *server)
    first, others = core.ask(PROMPT, 24, salt="acme"), core.ask(OTHER, 24, salt="acme2")
    core.settle()
    history = [*PROMPT, *first.tokens]
    before = held_by_host(core, history, "k4:acme")
    answer = forgotten(core)
    core.settle()
    device, host = len(core.slots(history, "k4:acme")), held_by_host(core, history, "k4:acme")
    core.forget()  # what is left is on the disks
    again, theirs = core.ask(PROMPT, 24, salt="acme"), core.ask(OTHER, 24, salt="acme2")
    core.settle()
    forgotten(core)  # it was kept again
    core.settle()
    core.tree.release_host_resources()
    return Left(before, answer, device, host, first, again, theirs, others)


def return_to(rank: int, port: int, *server: str) -> tuple[int, int]:
    core = engine(rank, port, *server)
    return core.ask(PROMPT, 1, salt="acme").cached, core.ask(OTHER, 1, salt="acme2").storage


@pytest.mark.parametrize("kind", ["tp", pytest.param("pp", marks=pytest.mark.slow)])
def test_what_was_forgotten_is_found_by_no_rank(models: None, tmp_path: Path, kind: str) -> None:
    server = (kind, "hidden:2,kv:2", "llama-gqa", *on_disk(tmp_path / "d"))
    found = run_ranks(leave, *server)
    assert found[0].answer["status"] == 200 and found[0].answer["complete"]
    assert found[0].answer["disk"] == {"blocks": 3, "complete": True}
    for rank in found:
        assert rank.before > 190 and (rank.device, rank.host) == (0, 0)
        assert rank.again.cached == 0 and rank.again.tokens == rank.first.tokens
        assert rank.theirs.storage >= 192 and rank.theirs.tokens == rank.others.tokens
    assert run_ranks(return_to, *server) == [(0, 192), (0, 192)]
    assert set(CORES) == {"tp", "pp"}
