"""Weights of layers that lie in host memory and come to the device ahead of their layer.

The device has two places: the layer that runs is in one of them, and the next one comes into the
other (HybridServe section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_hc.device.copy_stream import CopyStream
from sglang_hc.device.pinning import give_back_pinned
from sglang_hc.store.host_memory import mapped
from sglang_hc.store.scatter_queue import Event

PLACES = 2

PIECE_BYTES = 32 << 20
"""Bytes of one copy: other copies in this direction do not wait for a whole layer."""

ALIGNED = 256
"""Bytes to which every matrix is aligned, as torch's own device memory is."""

SPOILED = 0xFF
"""Fills a place that nobody may read: a NaN in every floating-point type."""


def aligned(size: int) -> int:
    """`size` bytes up to where the next matrix may begin."""
    return -(-size // ALIGNED) * ALIGNED


class Parked:
    """Matrices of one layer on their way into an arena.

    A matrix is any tensor whose elements fill its memory without gaps, in any order.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = tuple(parameters)
        self.bytes = sum(aligned(p.numel() * p.itemsize) for p in self.parameters)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The matrices in (n,) uint8 memory, with their shapes, strides and types."""
        found, at = [], 0
        for parameter in self.parameters:
            size = parameter.numel() * parameter.itemsize
            flat = memory[at : at + size].view(parameter.dtype)
            found.append(torch.as_strided(flat, parameter.shape, parameter.stride()))
            at += aligned(size)
        return found

    def park(self, arena: torch.Tensor) -> None:
        """Move the matrices to (bytes,) uint8 host memory. Their own memory is given back."""
        for parameter, view in zip(self.parameters, self.views(arena), strict=True):
            view.copy_(parameter.data)
            parameter.data = view


class WeightRing:
    """Layers [0, n), which run in this order, again and again; any order and any end are right.

    Before a layer runs, `enter` makes its weights valid and has those of the next one copied. Who
    uses a layer's weights otherwise asks `ready`. Between two calls of `enter` the place of the
    layer that runs is left alone, so it needs no call when it ends, and may end by an exception.
    Belongs to the thread that runs the model; all work with weights is submitted to the stream that
    is current in these calls.
    """

    def __init__(
        self,
        layers: Sequence[Parked],
        device: torch.device,
        copy_stream: CopyStream,
        spoil: bool = False,
    ) -> None:
        """Parks the layers, and gives back what they took before. spoil: a place is filled with NaN
        before it is refilled. Raises ConfigError when the host memory cannot be locked, and OSError
        when there is not so much."""
        self._copy_stream = copy_stream
        self._spoil = spoil
        memory = mapped(sum(layer.bytes for layer in layers))
        self._arenas = _cut(torch.frombuffer(memory, dtype=torch.uint8), layers)
        for layer, arena in zip(layers, self._arenas, strict=True):
            layer.park(arena)
            give_back_pinned()
        copy_stream.pin(memory)
        size = max(arena.numel() for arena in self._arenas)
        places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(PLACES)]
        self.places = tuple(place.fill_(SPOILED) for place in places)
        self._layers = tuple(layers)
        self._views = [[layer.views(place) for place in self.places] for layer in layers]
        self._held: list[int | None] = [None] * PLACES
        self._arrived: list[Event] = [copy_stream.record()] * PLACES
        self._last = 0
        """Place of the layer that was entered last."""
        self._entered: int | None = None
        self._asked: int | None = None
        """The layer that was entered last, and the one that `ready` was called for behind it."""
        for number in range(len(layers)):
            self._bind(number, 0)  # to the device: shapes and types can be asked of every layer

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(arena.numel() for arena in self._arenas)

    def numbers(self) -> dict[int, int]:
        """By the identity of each parameter, its layer."""
        return {id(p): number for number, one in enumerate(self._layers) for p in one.parameters}

    def enter(self, layer: int) -> None:
        """`layer` runs in the work submitted from now on; the one before has submitted all of its
        own. The next one's weights begin to come when the device is done with their place."""
        self._make_ready(layer, self._last)
        self._last = self._held.index(layer)
        self._entered, self._asked = layer, None
        following = (layer + 1) % len(self._layers)
        if following not in self._held:
            self._fill(1 - self._last, following)

    def ready(self, layer: int) -> None:
        """The weights of `layer` are valid for the work submitted from now on, up to the next call.

        Those of the layer that runs stay. Those of the next one may have to come once more.
        """
        self._make_ready(layer, 1 - self._last)
        self._asked = layer

    def is_valid(self, layer: int) -> bool:
        """Whether the last calls made the weights of `layer` valid for what is submitted now."""
        return layer in (self._entered, self._asked)

    def _make_ready(self, layer: int, place: int) -> None:
        """place: which one is given up if the layer is in none."""
        if layer not in self._held:
            self._fill(place, layer)
        self._copy_stream.before_compute(self._arrived[self._held.index(layer)])

    def _fill(self, place: int, layer: int) -> None:
        self._held[place] = None
        target, source = self.places[place], self._arenas[layer]
        if self._spoil:
            target.fill_(SPOILED)
        self._copy_stream.after(self._copy_stream.computed())
        for at in range(0, source.numel(), PIECE_BYTES):
            piece = source[at : at + PIECE_BYTES]
            self._copy_stream.copy(target[at : at + piece.numel()], piece)
        self._arrived[place] = self._copy_stream.record()
        self._held[place] = layer
        self._bind(layer, place)

    def _bind(self, layer: int, place: int) -> None:
        views = self._views[layer][place]
        for parameter, view in zip(self._layers[layer].parameters, views, strict=True):
            parameter.data = view


def _cut(memory: torch.Tensor, layers: Sequence[Parked]) -> list[torch.Tensor]:
    arenas, at = [], 0
    for layer in layers:
        arenas.append(memory[at : at + layer.bytes])
        at += layer.bytes
    return arenas
