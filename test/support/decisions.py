"""What tiers were told, and what they answered: ranks that decide alike have equal notes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.block_tree import BlockNode, Insertion

CALLS = ("stage", "unstage", "publish", "mark_ready", "access", "pin", "unpin", "evict", "drop",
         "clear", "_retire")  # fmt: skip
"""Of the host tier; the last one is of a block that leaves."""

Note = tuple[str, list[Any], Any]
"""(call, arguments, answer). A block is named by its slot."""


def note_decisions(tiers: Tiers, notes: list[Note]) -> None:
    """Append what the host tier and the look-ahead window do from now on."""
    note_calls(tiers.host, CALLS, notes)
    note_calls(tiers.queue.window, ("update", "leave"), notes)


def note_calls(part: object, calls: Sequence[str], notes: list[Note]) -> None:
    """Append each of these calls from now on."""

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def one(*args: Any, **named: Any) -> Any:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            told = [_plain(arg) for arg in args]  # a block that leaves loses its slot
            answer = call(*args, **named)
            notes.append((name, told, _plain(answer)))
            return answer

        return one

    for name in calls:
        setattr(part, name, noted(name, getattr(part, name)))


def _plain(value: Any) -> Any:
    if isinstance(value, BlockNode):
        return value.slot
    if isinstance(value, Insertion):
        return value.node.slot, value.created
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if callable(value) or isinstance(value, float):
        return None  # who is protected shows in what leaves; clocks differ
    return value
