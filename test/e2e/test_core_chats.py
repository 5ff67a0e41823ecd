"""Chats of ten turns with tools under SGLang's real scheduler, with windows and with states: all
leaves the device behind each request, and the next one of its conversation computes again less than
a block of what it had computed. Two conversations are told the same first."""

from __future__ import annotations

import random
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.identity import pack_tokens
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt
from support.storm_models import KINDS, prepared

NAMES = "gpt-oss-96", "qwen3-next"
SYSTEM, HEADER = prompt("system", 170), [3, 4, 5]
TURNS = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chats")
    for make in {KINDS[name].make for name in NAMES}:
        make(made)
    return made


def chat(seed: int, *, thinks: bool) -> Generator[tuple[list[int], int], list[int], None]:
    """A conversation: each turn has a question, up to two calls of tools, and an answer. Yields
    prompts, with the tokens that the reply is to have, and is sent the replies. thinks: before each
    reply, in words that stay in the prompt until the turn is over."""
    rng, history = random.Random(seed), list(SYSTEM)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(6, 900) for _ in range(rng.randint(low, high))]

    for _ in range(TURNS):
        history += words(5, 60)
        said: list[tuple[list[int], list[int]]] = []  # (thought, what stays) of this turn
        for calls_left in range(rng.randint(0, 2), -1, -1):
            told = [token for part in said for both in part for token in both]
            thought = rng.randint(10, 70) if thinks else 0
            reply = yield history + told + HEADER, thought + rng.randint(5, 45)
            result = words(5, 90) if calls_left else []
            said.append((HEADER + reply[:thought], reply[thought:] + result))
        for _, stays in said:
            history += HEADER + stays


class Asked(NamedTuple):
    """again: tokens of the prompt that were computed, and had been for its conversation before."""

    reply: list[int]
    again: int


def talk(model: str, thinks: bool, *flags: str) -> list[Asked]:
    """Requests of two conversations in turns. With the tiers all leaves the device behind each."""
    own = prepared(Path(model).name, model)
    core = Core(*SMALL, *own, "--max-total-tokens", "4096", *flags, model=model)
    talks, found = [chat(seed, thinks=thinks) for seed in range(2)], list[Asked]()
    asked = [next(one) for one in talks]
    known: list[list[bytes]] = [[], []]
    while asked[0] is not None or asked[1] is not None:
        for number, request in enumerate(asked):
            if request is None:
                continue
            reply = core.ask(*request)
            before = max((_common(request[0], one) for one in known[number]), default=0)
            found.append(Asked(reply.tokens, max(0, before - reply.cached)))
            # Of the last token nothing is computed.
            known[number].append(pack_tokens([*request[0], *reply.tokens[:-1]]))
            asked[number] = _next(talks[number], reply.tokens)
            if "--hc-disable" not in flags:
                core.settle()
                core.evict()
    return found


def _common(tokens: list[int], before: bytes) -> int:
    return common_tokens(pack_tokens(tokens), before)


def _next(talk: Generator[Any, list[int], None], reply: list[int]) -> Any:
    try:
        return talk.send(reply)
    except StopIteration:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_turn_computes_again_less_than_a_block(folder: Path, name: str, thinks: bool) -> None:
    model, alone = str(folder / name), ("--hc-disable", "--mamba-track-interval", "64")
    wanted = run_in_child(talk, model, thinks, *alone)
    found = run_in_child(talk, model, thinks)
    assert [one.reply for one in found] == [one.reply for one in wanted]
    again = [one.again for one in found]
    assert len(again) > 2 * TURNS and max(again) < BLOCK_TOKENS, again
