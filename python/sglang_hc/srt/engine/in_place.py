"""Whether this process has the hooks and the tree of `plugin.py`, and whether they ran.

SGLang only logs what a plugin raises. So nothing is trusted: `missing` looks at SGLang itself, the
launcher, tokenizer workers and the tree factory ask it, and each stops the start. A function may
still have its name and never be called; so it is noted what ran, and `never_ran` is asked behind
the first request (`srt/requests/self_test.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import Enum, auto
from functools import wraps
from typing import Any

import sglang
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.plugins.hook_registry import HookRegistry

BACKEND = "hc"
"""Name under which the tree is registered (`--radix-cache-backend`). Comes last."""

SGLANG_VERSION = "0.5.23"

ANY_SGLANG = "SGLANG_HC_ANY_SGLANG"
"""Environment variable of `make canary`: with "1" another release is tried."""

_expected: dict[str, None] = {}
"""Functions of SGLang with a hook, each once."""

_steps: dict[str, Callable[..., None]] = {}
"""Ours around SGLang's steps, by their names."""


class Proof(Enum):
    """The process in which every request has to run a hook."""

    TOKENIZER = auto()
    SCHEDULER = auto()


TREE = "HcRadixCache."

_due: dict[str, Proof] = {
    TREE + name: Proof.SCHEDULER
    for name in (
        "match_prefix", "prefetch_from_storage", "check_prefetch_progress", "take_in",
        "look_at_queue", "promise", "checkpoint", "on_release", "before_forward", "after_forward",
    )
}  # fmt: skip
"""What every request has to run: methods of the tree, and hooks by target and name."""

_ran: set[str] = set()

_answered = False
_proven = False


def expect(target: str) -> None:
    """A hook of this function of SGLang has to be in place."""
    _expected[target] = None


def noted(name: str, call: Callable[..., Any], proof: Proof) -> Callable[..., Any]:
    """`call`, of which is noted that it runs, as every request has to make it."""
    _due[name] = proof

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        _ran.add(name)
        return call(*args, **kwargs)

    return run


def ran(name: str) -> None:
    """A method of the tree runs."""
    _ran.add(TREE + name)


def never_ran(proof: Proof) -> list[str]:
    """What every request has to run in such a process and none has. Of a scheduler, once one was
    answered."""
    if proof is Proof.SCHEDULER and not _answered:
        return []
    return [name for name, where in _due.items() if where is proof and name not in _ran]


def answered() -> None:
    """A request of this scheduler is over."""
    global _answered  # noqa: PLW0603  as `_ran`, of this process
    _answered = True


def prove() -> None:
    """Behind the first request: raise RuntimeError, which ends this scheduler, if a hook that takes
    part in every request never ran."""
    global _proven  # noqa: PLW0603
    if _answered and not _proven:
        _proven = True
        never = never_ran(Proof.SCHEDULER)
        if never:
            raise RuntimeError(
                f"sglang-hc: the tiers do not serve: SGLang {sglang.__version__} never called "
                f"{', '.join(never)}. Use the release that this version is for, or --hc-disable"
            )


def expect_step(name: str, step: Callable[..., None]) -> None:
    """`step` has to be around this step of SGLang's, when it resolves its arguments."""
    _steps[name] = step


def missing() -> list[str]:
    """What of us is not in place in this process; empty when all is."""
    if sglang.__version__ != SGLANG_VERSION and os.environ.get(ANY_SGLANG) != "1":
        return [f"sglang=={SGLANG_VERSION} (found {sglang.__version__})"]
    gone = [target for target in _expected if target not in HookRegistry._patched]
    steps = resolution_hooks._HOOKS
    gone += [name for name, step in _steps.items() if step not in steps.get(name, ())]
    if BACKEND not in registered_radix_cache_backends():
        gone.append(f"radix cache backend {BACKEND!r}")
    return gone
