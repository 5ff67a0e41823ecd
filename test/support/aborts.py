"""Requests that clients abort at each point of their way, and what is said behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.core import Core

NEW = 24
"""Tokens of each reply."""

Submit = Callable[[Core, Any, int], str]
"""Hands in a prompt that gets so many tokens. Returns its id."""


def talk(
    core: Core, first: list[Any], more: Sequence[list[Any]], aborts: Sequence[int] = (),
    submit: Submit = Core.submit,
) -> list[list[int]]:  # fmt: skip
    """Replies to `first`, and to each of `more` behind both.

    aborts: before these, in turn, they are aborted at the top of such a pass of theirs, and others
    write over everything on the device before each request: what the aborted ones left is continued
    from host memory.
    """

    def ask(tokens: list[Any]) -> list[int]:
        rid = submit(core, tokens, NEW)
        core.run()
        return core.reply(rid).tokens

    replies = [ask(first)]
    history = [*first, *replies[0]]
    for count, at in enumerate(aborts):
        core.push_out()
        rid = submit(core, [*history, *more[count % len(more)]], NEW)
        core.run(each_pass=_abort_at(core, rid, at))
        core.settle()
    for own in more:
        if aborts:
            core.push_out()
        replies.append(ask([*history, *own]))
    if aborts:
        core.settle()
    return replies


def _abort_at(core: Core, rid: str, at: int) -> Callable[[int], None]:
    def each_pass(number: int) -> None:
        if number == at:
            core.abort(rid)

    return each_pass
