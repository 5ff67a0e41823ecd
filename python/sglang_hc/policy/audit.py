"""Audits: which restored blocks are computed again, how far two computations may lie apart, and
when there are too many differences.

A digest proves that bytes are those that were written. An audit proves that they belong to their
tokens: it runs the model over the tokens and compares.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

from sglang_hc.forms import Form

STOP_AFTER = 3
"""Wrong blocks of one form, found one by one, after which the form is not used any more. One may be
a fault of the memory; this many are a fault of the server."""

MOST_TOKENS = 8192
"""Blocks that end further from the start are not audited: all before them is computed too."""

MOST_SAMPLES = 16
"""Restorations that may wait for their audit."""

PINNED_SHARE = 1 / 32
"""Share of the host tier's slots that they may hold; one that is being audited as much again."""

WIDEST = 0.5
"""No bound is wider: states of other tokens differ by about the largest magnitude."""

STATE_FACTORS = 4
"""A recurrent state is a sum over tokens of key times value, times how much is taken of it, times
how much of it stays: so many factors, each with the error of the layer."""


class Sampler:
    """Picks a share of what is restored, pseudo-random and always the same."""

    def __init__(self, share: float) -> None:
        """share: of the blocks, 0 to 1."""
        self._share = share
        self._random = random.Random(0)

    def picks(self, blocks: int) -> list[int]:
        """Which of so many blocks are audited, in their order."""
        return [number for number in range(blocks) if self._random.random() < self._share]


def bound(tolerance: float, layer: int, behind_choice: bool = False) -> float:
    """The largest difference of two right computations of a layer, counted from 0, relative to the
    layer's largest magnitude.

    tolerance: of one layer, as the checks at start have it. Each layer before adds its own: a
    prefill is compared with what decode steps, other batches and restorations have computed.
    behind_choice: a layer before chooses experts, or tokens to attend to. Where two are nearly as
    good it may choose another one, for any token, and so what all later tokens have differs by more
    than rounding: only what belongs to other tokens differs by more than WIDEST in most rows.
    """
    return WIDEST if behind_choice else min(WIDEST, tolerance * (layer + 1))


class Findings:
    """Counts wrong blocks by form."""

    def __init__(self) -> None:
        self._wrong: Counter[Form] = Counter()

    def note(self, forms: Iterable[Form]) -> Form | None:
        """One block was wrong in these forms. Returns a form that has now reached STOP_AFTER."""
        stopped = None
        for form in forms:
            self._wrong[form] += 1
            if self._wrong[form] == STOP_AFTER:
                stopped = form
        return stopped
