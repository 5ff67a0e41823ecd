"""A conversation whose second turn another server answers, from what is below host memory."""

from __future__ import annotations

from typing import Any

from support.core import Core, Reply
from support.prompts import prompt

FLAGS = ("--max-total-tokens", "640", "--hc-host-size-gb", "0.2")
PROMPT, FOLLOW = prompt(3, 200), prompt(4, 20)
STORED = 256
"""Tokens of the full blocks of the first turn."""


def server(
    form: str, *below: str, dtype: str = "float32", model: str = "llama-mha", **options: Any
) -> Core:
    """below: flags of what is below host memory. options: see `Core`."""
    return Core("--hc-forms", form, "--dtype", dtype, *below, *FLAGS, model=model, **options)


def history(first: list[int]) -> list[int]:
    """The prompt of the second turn, given the reply to the first."""
    return [*PROMPT, *first, *FOLLOW]


def both_turns() -> tuple[list[int], list[int]]:
    """Replies of a server that never stopped and never evicted."""
    core = server("kv")
    first = core.ask(PROMPT, 60).tokens
    return first, core.ask(history(first), 24).tokens


def first_turn(form: str, *below: str, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """The reply, and what was counted."""
    core = server(form, *below, **options)
    reply = core.ask(PROMPT, 60)
    core.settle()
    return reply.tokens, core.tree.stats()


def second_turn(
    form: str, first: list[int], *below: str, salt: str | None = None, **options: Any
) -> tuple[Reply, dict[str, Any]]:
    """The reply, given the one to the first turn; what was counted, and under "backend" the name
    that SGLang shows of the store."""
    core = server(form, *below, **options)
    reply = core.ask(history(first), 24, salt)
    core.settle()
    shown = type(core.tree.cache_controller.storage_backend).__name__
    return reply, core.tree.stats() | {"backend": shown}
