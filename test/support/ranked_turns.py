"""Conversations on several ranks whose state leaves them, beside the same ones that stay on the
device; and whether the ranks decided alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from support.conversations import Outcome, compare, options
from support.prompts import prompt
from support.ranked_core import KINDS, RankedCore, run_ranks

FLAGS = ("--max-total-tokens", "1600", "--dtype", "float32", "--hc-host-size-gb", "0.2")
BLOCKS = 256
"""Tokens of the full blocks of a first turn."""


class Turns(NamedTuple):
    """Two turns. said, wanted: replies of the conversation that stayed on the device. first,
    second: those of the one that was forgotten in between. stored: tokens that came from below host
    memory. counted: what this rank counted meanwhile."""

    said: list[int]
    wanted: list[int]
    first: list[int]
    second: list[int]
    stored: int
    counted: dict[str, int]


def engine(rank: int, port: int, kind: str, form: str, model: str, *below: str) -> RankedCore:
    """below: flags of what is below host memory."""
    return KINDS[kind](rank, port, "--hc-forms", form, *below, *FLAGS, model=model)


def both_on_rank(
    rank: int, port: int, kind: str, model: str, form: str, *flags: str, **env: str
) -> tuple[Outcome, dict[str, Any]]:
    """The conversations of `compare`, and the tiers' part of what /server_info shows then."""
    core = KINDS[kind](rank, port, *options(form, "float32"), *flags, model=model, **env)
    return compare(core), core.shown()


def worst_of_stage(rank: Outcome) -> float:
    """Largest error of the layers that a stage has, over all turns."""
    return max(max(turn) for turn in rank.evicted["error"])


def prompts(name: str) -> tuple[list[int], list[int]]:
    both = prompt(name, 220)
    return both[:200], both[200:]


def talk(core: RankedCore, name: str, between: Callable[[], None] = lambda: None) -> Turns:
    """between: runs on all ranks after the first turn was saved and forgotten."""
    first_prompt, follow = prompts(name)
    said = core.ask(first_prompt, 60, "kept").tokens
    wanted = core.ask([*first_prompt, *said, *follow], 24, "kept").tokens
    before = core.tree.tiers.counts()
    first = core.ask(first_prompt, 60, name).tokens
    core.forget()
    between()
    reply = core.ask([*first_prompt, *first, *follow], 24, name)
    core.settle()
    counts = core.tree.tiers.counts()
    counted = {key: value - before.get(key, 0) for key, value in counts.items()}
    return Turns(said, wanted, first, reply.tokens, reply.storage, counted)


def check_tokens(found: list[Turns]) -> None:
    for turns in found:
        assert (turns.first, turns.second) == (turns.said, turns.wanted)
        assert turns[:5] == found[0][:5], "all ranks saw the same"
    assert len({turns.counted.get("restored_tokens", 0) for turns in found}) == 1


Start = Callable[..., RankedCore]
"""Starts an engine as `engine` does."""


def talk_and_stop(
    rank: int, port: int, *server: str, start: Start = engine
) -> tuple[Turns, list[int]]:
    """Two turns, and the reply to the first turn of a conversation that another server goes on
    with: what of it is below host memory is all that is left. server: see `engine`."""
    core = start(rank, port, *server)
    turns = talk(core, "before")
    left = core.ask(prompts("later")[0], 60).tokens
    core.settle()
    core.tree.release_host_resources()
    return turns, left


def go_on(rank: int, port: int, *server: str, start: Start = engine) -> Turns:
    """The second turn of that conversation, beside both turns that stay on the device."""
    core = start(rank, port, *server)
    first, follow = prompts("later")
    said = core.ask(first, 60, "kept").tokens
    wanted = core.ask([*first, *said, *follow], 24, "kept").tokens
    reply = core.ask([*first, *said, *follow], 24)
    core.settle()
    return Turns(said, wanted, said, reply.tokens, reply.storage, core.tree.tiers.counts())


def check_two_servers(start: Start, *server: str) -> None:
    """Of two ranks: what a server forgets comes back from below host memory, and what it leaves
    there the next one goes on with."""
    found = run_ranks(partial(talk_and_stop, start=start), *server)
    check_tokens([turns for turns, _ in found])
    assert found[0][0].counted["restored_tokens"] == found[0][0].stored == BLOCKS
    later = run_ranks(partial(go_on, start=start), *server)
    check_tokens(later)
    assert later[0].said == found[0][1] and later[0].stored == BLOCKS
