"""Hidden states of a verify pass, kept until the host knows how many of its rows are accepted.

Speculative decoding runs the model over proposed tokens. The device knows behind the pass which of
them it accepts; the host is told later, with overlap scheduling after the next pass was launched.
So the rows of the accepted path are copied out of the taps in the order of their positions, and
`Capture` takes as many of them as count once the host knows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_hc.capture.taps import TapBuffer

PASSES = 2
"""Verify passes whose rows are held at once: the one that runs, and the one before it, whose result
the host takes in meanwhile."""


class Held(NamedTuple):
    """Rows along the accepted paths of one verify pass.

    states: (layers, requests * width, row bytes) uint8; request i's path begins at row i * width.
    What lies behind the end of a path has no meaning.
    """

    states: torch.Tensor
    width: int


class VerifiedRows:
    """Memory for the accepted paths of the last PASSES verify passes."""

    def __init__(self, taps: TapBuffer, rows: int) -> None:
        """rows: most rows of the accepted paths of one pass. Raises torch's out of memory."""
        layers, _, width = taps.states.shape
        self._taps = taps
        self._rows = rows
        shape = (PASSES, layers * rows * width)
        self._memory = torch.empty(shape, dtype=taps.states.dtype, device=taps.states.device)
        self._next = 0
        self._last: Held | None = None

    def hold(self, path: torch.Tensor, rows: int) -> None:
        """Copy the rows of the last pass that lie on the accepted paths of its requests.

        path: (requests, length) int, numbers of rows in the pass, -1 behind the end of a path.
        rows: of one request in the pass. Requests at the end for which there is no room are left
        out. What was copied is valid for work on this stream until the second next call.
        """
        length = path.shape[1]
        fit = min(path.shape[0], self._taps.rows // rows, self._rows // length)
        chosen = path[:fit].flatten().clamp(min=0)
        states = self._taps.states
        shape = states.shape[0], chosen.numel(), states.shape[2]
        held = self._memory[self._next][: shape[0] * shape[1] * shape[2]].view(shape)
        self._next = (self._next + 1) % PASSES
        torch.index_select(states, 1, chosen, out=held)
        self._last = Held(held.view(torch.uint8), length)

    def take(self) -> Held | None:
        """What the last pass left, once."""
        held, self._last = self._last, None
        return held
