"""SGLang's engine with sparse attention on a CPU, and a conversation of two turns with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from support import sparse_kernels
from support.core import Core, Reply
from support.prompts import SMALL, prompt

PROMPT, MORE = prompt("sparse", 300), prompt("more", 90)
FLAGS = "--attention-backend", "dsa"
KEPT = 320
"""Tokens of whole pages, and blocks, of the first turn."""


def engine(model: str, *flags: str, **options: Any) -> Core:
    """model: path of one of `sparse_model`."""
    sparse_kernels.use()
    return Core(*FLAGS, *SMALL, *flags, model=model, **options)


def history(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *MORE]


def state(core: Core, tokens: list[int]) -> list[torch.Tensor]:
    """What the device has of a prompt's whole pages: per part (layers, tokens, bytes)."""
    from sglang_hc.srt.model.kv_pool import KvPoolRows

    rows = KvPoolRows(core.scheduler.token_to_kv_pool_allocator.get_kvcache(), None)
    slots, layers = core.slots(tokens).long(), range(rows.num_layers)
    found = [
        torch.zeros((len(layers), len(slots), width), dtype=torch.uint8)
        for width in rows.part_bytes
    ]
    rows.gather(layers, slots, found, 0)
    return found


class Told(NamedTuple):
    """Both replies. same: whether the device had the same bytes before and after; None where
    nothing was evicted."""

    first: list[int]
    second: Reply
    same: bool | None
    stats: dict[str, Any]


def never_evicted(model: str, *flags: str) -> list[list[int]]:
    """The replies of SGLang alone."""
    core = engine(model, *flags, "--hc-disable")
    first = core.ask(PROMPT, 24).tokens
    return [first, core.ask(history(first), 24).tokens]


def evicted(model: str, *flags: str, spoil: Any = None) -> Told:
    """Others write over everything on the device between the turns. spoil: is called before, with
    what is in host memory."""
    core = engine(model, *flags)
    first = core.ask(PROMPT, 24).tokens
    told = history(first)
    before = state(core, told)
    core.push_out()
    if spoil is not None:
        spoil(core)
    second = core.ask(told, 24)
    core.settle()
    after = [part[:, :KEPT] for part in state(core, told)]
    same = all(map(torch.equal, [part[:, :KEPT] for part in before], after))
    return Told(first, second, same, core.tree.stats())


def exchange(core: Core, parts: slice) -> None:
    """Parts of the rows of two blocks of the first turn change places in host memory."""
    core.tree.tiers.drain()
    known = core.tree.tiers.host.tree.nodes(lambda name: name is None)
    path = max((node.path() for node in known), key=len)
    one, other = path[0].slot, path[2].slot
    for part in core.tree.tiers.restorer.path.pool.kv[parts]:
        part[[one, other]] = part[[other, one]]
