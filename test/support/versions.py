"""Weights that were never there before."""

from __future__ import annotations

import itertools

from support.core import Core

_numbers = itertools.count()


def new_version(core: Core) -> None:
    """What an update does to the tree that brings such weights; the model keeps its own."""
    weights = core.tree.weights
    weights._digest = lambda: f"{next(_numbers):032x}"
    with core.tree.weights_change(list):
        pass
    core.tree.weights_settled()
