"""The stream on which the model runs, and how other work of the scheduler is ordered with it.

SGLang has two streams that matter here. On the schedule stream, which is current in the scheduler's
event loop, it writes the table of device slots per request and frees slots. With overlap scheduling
and in a pipeline the model runs on the forward stream; else it runs on the schedule stream too.

What the tiers do to the KV pool, to taps and to frames belongs on the stream of the model: there it
is ordered with every pass. What the schedule stream may change at any time, a row of the slot
table, is copied on that stream first: work on the forward stream waits behind a batch, and the
schedule stream does not wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_resources

from sglang_hc.srt.binding import arguments


class ComputeStream:
    """Where SGLang runs the forward passes. Belongs to the scheduler thread."""

    def __init__(self, device: torch.device, forward: Any = None) -> None:
        """forward: the stream of the forward passes; None: they run on the one that is current."""
        self._streams: Any = torch.get_device_module(device)
        self.forward = forward

    @classmethod
    def of(cls, runner: Any) -> ComputeStream:
        """As SGLang's scheduler decides it for a model runner."""
        has_own = arguments.has_forward_stream(arguments.of(runner))
        return cls(torch.device(runner.device), runner.forward_stream if has_own else None)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Work submitted inside is ordered with the forward passes, and comes after all that was
        submitted to the current stream before."""
        if self.forward is None:
            yield
            return
        self.forward.wait_stream(self._streams.current_stream())
        with self._streams.stream(self.forward):
            yield

    def will_read(self, *tensors: torch.Tensor) -> None:
        """Tensors made on the current stream are used inside `entered`: when Python drops one, its
        memory gets no new owner before that work is over."""
        if self.forward is None:
            return
        for tensor in tensors:
            if tensor.device.type != "cpu":
                tensor.record_stream(self.forward)


def model_streams(runner: Any) -> list[Any]:
    """Streams on which SGLang runs the model: that of the passes, and the named ones, such as the
    one beside it for norms of queries and keys.

    Its streams for scheduling and for results come later and are other ones: torch hands out 32 in
    turn, and the tiers take a few.
    """
    return [runner.forward_stream, *get_resources().streams.values()]
