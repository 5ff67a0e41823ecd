"""What a start of an engine says: that it leaves something out, or why it is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from sglang_hc.config import ConfigError
from support.core import Core, run_in_child

Engine = Callable[..., Core]


class Said(NamedTuple):
    """What a start logs, and the layer plan."""

    lines: list[str]
    plan: str


def _said(engine: Engine, model: str, *flags: str) -> Said:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang_hc").addHandler(handler)
    core = engine(model, *flags)
    return Said(lines, core.tree.stats()["layer_plan"])


def check_left_out(engine: Engine, model: str, plan: str, architecture: str) -> None:
    """Hidden form, which nobody has proven for this architecture; the log says so."""
    said = run_in_child(_said, engine, model, "--hc-forms", "hidden")
    assert said.plan == plan
    why = f"is served without hidden: {architecture} is not among the families"
    assert any(why in line for line in said.lines)


def _refusal(engine: Engine, model: str, *flags: str) -> str:
    try:
        engine(model, *flags)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was started")


def refusal(engine: Engine, model: str, *flags: str) -> str:
    """Why a start is refused."""
    return run_in_child(_refusal, engine, model, *flags)
