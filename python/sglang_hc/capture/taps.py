"""The tap: hidden states at the input of each fused QKV projection, left in one static buffer.

The copy is part of the forward pass, at a fixed address, so a CUDA graph records it and replays it;
a hook that kept a reference would run once, at capture, and serve stale states for ever. On a GPU
it runs beside the projection, whose input it shares, and is over before anything behind the
projection begins: nobody can overwrite or free that input before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from sglang_hc.device.side_branch import SideBranch


class TapBuffer:
    """(layers, rows, hidden_size) states of the last pass. Only its first rows are valid; of a pass
    with more rows than the buffer, the first ones are left here."""

    def __init__(
        self,
        layers: int,
        rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        branch: SideBranch | None = None,
    ) -> None:
        """branch: where the copies run; None: in line with the model."""
        self.branch = branch
        self.states = torch.empty((layers, rows, hidden_size), dtype=dtype, device=device)
        self._paused = False

    @property
    def rows(self) -> int:
        return self.states.shape[1]

    @property
    def row_bytes(self) -> int:
        """Of one row of one layer."""
        return self.states.shape[2] * self.states.element_size()

    def install(self, index: int, projection: torch.nn.Module) -> None:
        """Tap the first argument of `projection` into layer `index`. Before any graph capture."""
        target = self.states[index]

        def tap(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._paused:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            count = min(hidden.shape[0], target.shape[0])
            target[:count].copy_(hidden[:count])

        branch = self.branch
        if branch is None:
            projection.register_forward_pre_hook(tap, with_kwargs=True)
            return

        def fork(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._paused:
                return
            with branch.forked():
                tap(module, args, kwargs)

        def join(*_: Any) -> None:
            branch.join()

        projection.register_forward_pre_hook(fork, with_kwargs=True)
        # Called when the copy or the projection raises as well.
        projection.register_forward_hook(join, always_call=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside leave the buffer alone: what they compute is not a request's own."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def bytes(self, rows: int) -> torch.Tensor:
        """The first `rows` rows as (layers, rows, row bytes) uint8."""
        return self.states[:, :rows].view(torch.uint8)
