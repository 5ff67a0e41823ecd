"""SGLang's engine with sliding windows on a CPU, and a conversation of two turns with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import window_kernels, window_model
from support.core import Core, Reply
from support.prompts import NO_PROCESSOR, SMALL, prompt

PROMPT, MORE = prompt("window", 300), prompt("more", 90)
KEPT = 320
"""Tokens of whole blocks of the first turn."""


def flags_of(model: str) -> tuple[str, ...]:
    """What SGLang needs to serve one of `window_model` on a CPU. model: its path."""
    name = Path(model).name
    more = ("--moe-runner-backend", "triton") if "gpt-oss" in name else ()
    more += NO_PROCESSOR if name == window_model.PUBLISHED else ()
    return "--attention-backend", window_kernels.BACKEND, *more


def engine(model: str, *flags: str, **options: Any) -> Core:
    """model: path of one of `window_model`."""
    window_kernels.use()
    return Core(*flags_of(model), *SMALL, *flags, model=model, **options)


def history(first: Sequence[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *MORE]


def by_transformers(model: str) -> list[list[int]]:
    """Both replies, greedy."""
    import torch
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def reply(tokens: Sequence[int]) -> list[int]:
        given = torch.tensor([tokens])
        with torch.no_grad():
            out = net.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=24,
                min_new_tokens=24, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        found: list[int] = out[0, len(tokens) :].tolist()
        return found

    first = reply(PROMPT)
    return [first, reply(history(first))]


class Told(NamedTuple):
    """Both replies, and what was counted."""

    first: list[int]
    second: Reply
    stats: dict[str, Any]


def never_evicted(model: str, *flags: str) -> list[list[int]]:
    """The replies of SGLang alone."""
    core = engine(model, *flags, "--hc-disable")
    first = core.ask(PROMPT, 24).tokens
    return [first, core.ask(history(first), 24).tokens]


def evicted(
    model: str, *flags: str, plant: Callable[[], object] | None = None,
    spoil: Callable[[Core], object] | None = None, start: Callable[..., Core] = engine,
) -> Told:  # fmt: skip
    """Others write over everything on the device between the turns. plant: an error, before there
    is an engine. spoil: is called before, with what is in host memory. start: the engine."""
    if plant is not None:
        plant()
    core = start(model, *flags)
    first = core.ask(PROMPT, 24).tokens
    core.push_out()
    if spoil is not None:
        spoil(core)
    second = core.ask(history(first), 24)
    core.settle()
    return Told(first, second, core.tree.stats())


def paths(core: Core) -> list[list[Any]]:
    """Blocks of the longest path of each namespace-less branch in host memory, longest first."""
    core.tree.tiers.drain()
    known = core.tree.tiers.host.tree.nodes(lambda name: name is None)
    return sorted((node.path() for node in known), key=len, reverse=True)


def exchange(core: Core) -> None:
    """The windows of two blocks of the first turn change places in host memory."""
    path = paths(core)[0]
    one, other = (path[number].end.slot for number in (3, 4))
    for part in core.tree.tiers.restorer.path.ends.pool.window:
        part[[one, other]] = part[[other, one]]


# -- planted errors -------------------------------------------------------------------------------


def shorter_window() -> None:
    """Our layout believes that a window reaches back half as far as it does."""
    from sglang_hc.forms import EndLayout, WindowLayers
    from sglang_hc.srt.model.window_pool import WindowPool

    def layout(self: WindowPool) -> EndLayout:
        return EndLayout(WindowLayers(self.layers, self.tokens // 2, self.rows.part_bytes))

    WindowPool.layout = property(layout)  # type: ignore[assignment,method-assign]


def without_a_block() -> None:
    """Of the blocks that the first end needs the last one is not saved."""
    from sglang_hc.capture.ends import EndSaver

    gather, parts = EndSaver._gather, itertools.count(1)

    def all_but_one(self: EndSaver, part: Any, low: int, slots: Any) -> None:
        if next(parts) != self._ends.layout.blocks:
            gather(self, part, low, slots)

    EndSaver._gather = all_but_one  # type: ignore[method-assign]


def without_a_layer() -> None:
    """The last layer with a window is not restored."""
    from sglang_hc.restore.restore_pass import RestorePass

    loads = RestorePass._window_loads

    def all_but_last(self: RestorePass) -> Any:
        found = list(loads(self))
        return iter([load for load in found if load.layer < found[-1].layer])

    RestorePass._window_loads = all_but_last  # type: ignore[method-assign]
