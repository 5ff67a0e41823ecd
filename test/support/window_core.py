"""SGLang's engine with sliding windows on a CPU, and a conversation of two turns with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from support import window_kernels
from support.core import Core, Reply
from support.prompts import SMALL, prompt

PROMPT, MORE = prompt("window", 300), prompt("more", 90)


def engine(model: str, *flags: str, **options: Any) -> Core:
    """model: path of one of `window_model`."""
    window_kernels.use()
    own = ["--attention-backend", window_kernels.BACKEND]
    if Path(model).name.startswith("gpt-oss"):
        own += ["--moe-runner-backend", "triton"]
    return Core(*own, *SMALL, *flags, model=model, **options)


def history(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *MORE]


class Told(NamedTuple):
    first: list[int]
    second: Reply
    stats: dict[str, Any]


def never_evicted(model: str, *flags: str) -> list[list[int]]:
    """The replies of SGLang alone."""
    core = engine(model, *flags, "--hc-disable")
    first = core.ask(PROMPT, 24).tokens
    return [first, core.ask(history(first), 24).tokens]
