"""Whether this process has the hooks and the tree of `plugin.py`.

SGLang only logs what a plugin raises. So nothing is trusted: `missing` looks at SGLang itself, the
launcher, tokenizer workers and the tree factory ask it, and each stops the start.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.plugins.hook_registry import HookRegistry

BACKEND = "hc"
"""Name under which the tree is registered (`--radix-cache-backend`). Comes last."""

SGLANG_VERSION = "0.5.23"

_expected: dict[str, None] = {}
"""Functions of SGLang with a hook, each once."""

_steps: dict[str, Callable[..., None]] = {}
"""Ours around SGLang's steps, by their names."""


def expect(target: str) -> None:
    """A hook of this function of SGLang has to be in place."""
    _expected[target] = None


def expect_step(name: str, step: Callable[..., None]) -> None:
    """`step` has to be around this step of SGLang's, when it resolves its arguments."""
    _steps[name] = step


def missing() -> list[str]:
    """What of us is not in place in this process; empty when all is."""
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        return [f"sglang=={SGLANG_VERSION} (found {sglang.__version__})"]
    gone = [target for target in _expected if target not in HookRegistry._patched]
    steps = resolution_hooks._HOOKS
    gone += [name for name, step in _steps.items() if step not in steps.get(name, ())]
    if BACKEND not in registered_radix_cache_backends():
        gone.append(f"radix cache backend {BACKEND!r}")
    return gone
