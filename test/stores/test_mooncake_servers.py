"""Two servers over one Mooncake: conversations go on at the other one, and back, while its master
is killed and started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmark.harness.server import ServerProcess
from support.core import Core, run_in_child
from support.mooncake import MASTER, PATH, Mooncake, needs_mooncake
from support.prompts import prompt
from support.served import generate, numbers, start, wait_for

pytestmark = [pytest.mark.server, pytest.mark.slow, needs_mooncake]

TALKS, TURNS = 8, 6
PROMPT, REPLY, FOLLOW, LATER = 240, 20, 50, 14
"""Tokens of a first prompt and its reply, of a later one and its reply: a returning history is some
tokens longer than its whole blocks."""

HOST = ("--hc-host-size-gb", "0.01", "--hc-eviction", "lru")
"""Room for 20 blocks: less than the conversations have after their first turn."""


def follow(talk: int, turn: int) -> list[int]:
    return prompt(f"{talk} {turn}", FOLLOW if turn else PROMPT)


def undisturbed() -> list[list[list[int]]]:
    """The replies of each conversation, by a server that has no tiers and never forgets."""
    core, talks = Core("--hc-disable", "--dtype", "float32", "--max-total-tokens", "8192"), []
    for talk in range(TALKS):
        history, replies = [], []
        for turn in range(TURNS):
            history += follow(talk, turn)
            replies.append(core.ask(history, LATER if turn else REPLY).tokens)
            history += replies[-1]
        talks.append(replies)
    return talks


@pytest.fixture(scope="module")
def wanted(models: None) -> list[list[list[int]]]:
    replies: list[list[list[int]]] = run_in_child(undisturbed)
    return replies


class Talks:
    """Conversations of one test, each turn of them at a server of its own."""

    def __init__(self, wanted: list[list[list[int]]]) -> None:
        self._wanted = wanted
        self._histories: list[list[int]] = [[] for _ in wanted]
        self._turns = [0] * len(wanted)

    def go_on(self, talk: int, server: ServerProcess) -> tuple[int, int]:
        """The next turn of a conversation: what is known of its history, in tokens, and how many of
        these came from the store."""
        turn, history = self._turns[talk], self._histories[talk]
        known = len(history)
        history += follow(talk, turn)
        tokens, stored = generate(server, history, LATER if turn else REPLY)
        assert tokens == self._wanted[talk][turn]
        history += tokens
        self._turns[talk] += 1
        return known, stored

    def all_go_on(self, server: ServerProcess) -> float:
        """Each conversation, one after another. Returns the share that came from the store."""
        known, stored = map(sum, zip(*(self.go_on(i, server) for i in range(TALKS)), strict=True))
        settled(server)
        return stored / max(1, known)


def settled(server: ServerProcess) -> None:
    """Wait until nothing more is saved."""
    seen: list[int] = []

    def rests() -> bool:
        seen.append(numbers(server).get("remote_saved_blocks", 0))
        time.sleep(0.3)
        return len(seen) > 3 and seen[-1] == seen[-4]

    wait_for(rests)


Servers = Callable[[Mooncake], Sequence[ServerProcess]]


@pytest.fixture
def servers(models: None, tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:

        def two(store: Mooncake) -> list[ServerProcess]:
            starting = [
                start(tmp_path / f"log{n}", *HOST, *store.flags(), env=PATH) for n in range(2)
            ]
            return [stack.enter_context(server) for server in starting]

        yield two


def test_conversations_go_to_the_other_server_and_back(
    wanted: list[list[list[int]]], servers: Servers, tmp_path: Path
) -> None:
    with Mooncake(tmp_path) as store:
        one, other = servers(store)
        talks = Talks(wanted)
        assert talks.all_go_on(one) == 0
        there, back = talks.all_go_on(other), talks.all_go_on(one)
        print(f"of the returning tokens from the store: {there:.3f} there, {back:.3f} back")
        assert min(there, back) >= 0.95

        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(talks.go_on, i, (one, other)[i % 2]) for i in range(TALKS)]
            asked[1].result()
            store.kill(MASTER)
            asked[4].result()
            store.start_master()
            assert [future.result() for future in asked], "each was answered, with its tokens"
        counted = [numbers(server) for server in (one, other)]
        print([{k: v for k, v in c.items() if k.startswith("remote_") and v} for c in counted])

        wait_for(lambda: all(numbers(server)["remote_usable"] for server in (one, other)))
        again, moved = talks.all_go_on(one), talks.all_go_on(other)
        print(f"after the master's death: {again:.3f} and, at the other server, {moved:.3f}")
        assert moved >= 0.95


def test_a_server_that_dies_takes_its_part_of_the_store_along(
    wanted: list[list[list[int]]], servers: Servers, tmp_path: Path
) -> None:
    """Here the servers themselves hold the blocks."""
    with Mooncake(tmp_path, node_mb=0, own_mb=64) as store:
        one, other = servers(store)
        talks = Talks(wanted)
        talks.all_go_on(one)
        talks.all_go_on(other)
        os.killpg(one.pid, signal.SIGKILL)
        shares = [talks.all_go_on(other) for _ in range(3)]
        counted = numbers(other)
    print(f"from the store behind the death: {shares}; {counted['remote_read_missing']} missing")
    assert counted["remote_read_missing"] > 0
    assert shares[-1] >= 0.95, "what was lost was saved again"
