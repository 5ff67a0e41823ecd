"""The models that storms are of: one of each kind of layers, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from support import (
    sparse_core,
    sparse_kernels,
    sparse_model,
    state_core,
    state_kernels,
    state_model,
    window_core,
    window_kernels,
    window_model,
)


class _Kind(NamedTuple):
    """make: writes all its models to a folder. use: torch for its kernels, in this process. flags:
    what SGLang needs to serve a model with this path."""

    names: tuple[str, ...]
    make: Callable[[Path], None]
    use: Callable[[], None]
    flags: Callable[[str], tuple[str, ...]]


WINDOWS = _Kind(
    tuple(window_model.MODELS), window_model.make, window_kernels.use, window_core.flags_of
)
STATES = _Kind(
    tuple(state_model.MODELS), state_model.make, state_kernels.use, lambda _: state_core.STATES
)
SPARSE = _Kind(
    tuple(sparse_model.MODELS), sparse_model.make, sparse_kernels.use, lambda _: sparse_core.FLAGS
)

KINDS = {name: kind for kind in (WINDOWS, STATES, SPARSE) for name in kind.names}
"""By the name of a model; a model whose layers all have full attention is not in it."""


def prepared(model: str, path: str) -> tuple[str, ...]:
    """Flags for the model of this name, whose files are in `path`, in a process that is to serve
    with it now."""
    kind = KINDS.get(model)
    if kind is None:
        return ()
    kind.use()
    return kind.flags(path)
