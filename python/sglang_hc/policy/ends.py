"""Where the paths of requests get ends, behind which models can go on whose layers do not all have
full attention.

A conversation comes back at three places: behind its reply, with the next question or the result of
a tool; behind its prompt, where the next turn repeats the reply in other words (without what was
thought before it); and where a prefix that many share branches. Ends lie there, not on a grid: what
is computed again is less than a block, and there are few of them. How many are kept is the budget's
business (`tree.ends`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS


class Stay(enum.IntEnum):
    """How long an end is worth its bytes.

    REPLY: until a later end of its path. PROMPT: too; it becomes LASTING where a request has left
    the path of its conversation: until a later LASTING one. SHARED: as long as it is used.
    """

    REPLY = 0
    PROMPT = 1
    LASTING = 2
    SHARED = 3


class Place(NamedTuple):
    """Behind how many first blocks of a path an end is wanted, and how long."""

    blocks: int
    stay: Stay


def ends_wanted(prompt: int, kept: int, shared: int = 0) -> list[Place]:
    """Where the path of a request gets ends, in path order.

    prompt: tokens of its prompt. kept: tokens of prompt and reply whose state is kept; those of the
    prompt alone before it has replied. shared: tokens that it has in common with a path that
    goes on otherwise there; 0 where it continues one, or has nothing in common with any.
    """
    found: dict[int, Stay] = {}
    for tokens, stay in ((shared, Stay.SHARED), (prompt, Stay.PROMPT), (kept, Stay.REPLY)):
        if tokens <= kept:
            found.setdefault(tokens // BLOCK_TOKENS, stay)
    return [Place(blocks, found[blocks]) for blocks in sorted(found) if blocks]
