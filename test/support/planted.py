"""Errors planted in the places of ours that SGLang calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_hc.srt.engine import guard
from sglang_hc.srt.tree.capturing_tree import CapturingTree
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from support import leaks


class Planted(Exception):
    """The error of a test."""


class Faults:
    """Raises in one place, before its own code or behind it."""

    def __init__(self) -> None:
        self.place = ""
        self.late = False

    def around(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == self.place and not self.late:
                raise Planted(name)
            result = own(*args, **kwargs)
            if name == self.place:
                raise Planted(name)
            return result

        call.__name__, call.__module__ = own.__name__, own.__module__
        return call

    def plant(self) -> None:
        """In this process, which has no tree yet."""
        leaks.errors_are_planted = True
        for name, method in guarded_methods().items():
            self._plant(method, "own", name)
        for entries in HookRegistry._hooks.values():
            for hook in (inspect.unwrap(entry[1]) for entry in entries):
                if "hook" in hook.__code__.co_freevars:  # it is guarded
                    self._plant(hook, "hook", guard.name_of(hook))

    def _plant(self, guarded: Callable[..., Any], variable: str, name: str) -> None:
        """Inside of the guard, whose `variable` is what it guards."""
        cell = guarded.__closure__[guarded.__code__.co_freevars.index(variable)]  # type: ignore
        cell.cell_contents = self.around(name, cell.cell_contents)


def guarded_methods() -> dict[str, Callable[..., Any]]:
    """Of the tree, by name."""
    members = {**vars(CapturingTree), **vars(HcRadixCache)}
    wrapped = {name: one for name, one in members.items() if hasattr(one, "__wrapped__")}
    return {name: one for name, one in wrapped.items() if "own" in one.__code__.co_freevars}
