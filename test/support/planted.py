"""Errors planted in the places of ours that SGLang calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_hc.srt.engine import guard
from sglang_hc.srt.tree.tree_backend import HcRadixCache


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
        for name in guard.METHODS:
            setattr(HcRadixCache, name, self.around(name, getattr(HcRadixCache, name)))
        for entries in HookRegistry._hooks.values():
            for _, hook, _ in entries:
                if "hook" in hook.__code__.co_freevars:  # it is guarded
                    cell = hook.__closure__[hook.__code__.co_freevars.index("hook")]
                    cell.cell_contents = self.around(guard.name_of(hook), cell.cell_contents)
