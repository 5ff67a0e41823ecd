"""Engines some of whose weights lie in host memory, and mistakes planted there.

Weights come to the "device" when somebody waits for them and not before (`LateCopyStream`), and a
place is full of NaN until then: a layer that computes with what it did not ask for gives NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from sglang_hc.device.weight_ring import WeightRing
from support.copy_streams import LateCopyStream
from support.core import Core
from support.prompts import SMALL, prompt

ALL, SOME = "1", "0.0001"
"""GiB: all layers, and three of the four of a tiny model, the fewest that a ring pays for."""

TURNS = 3


class Told(NamedTuple):
    """replies: of each turn. host: tokens of each that came from host memory. rows: K and V of the
    whole conversation, per layer and part, as arrays of bytes. hosted: layers in host memory."""

    replies: list[list[int]]
    host: list[int]
    rows: list[Any]
    hosted: list[int]
    stats: dict[str, Any]


class NeverWaits(WeightRing):
    """Layers compute before their weights are there."""

    def _make_ready(self, layer: int, place: int) -> None:
        if layer not in self._held:
            self._fill(place, layer)


class RefillsTooEarly(WeightRing):
    """The next layer's weights come into the place of the one that runs."""

    def enter(self, layer: int) -> None:
        self._make_ready(layer, self._last)
        self._last = self._held.index(layer)
        self._entered, self._asked = layer, None
        following = (layer + 1) % len(self._layers)
        if following not in self._held:
            self._fill(self._last, following)


@contextlib.contextmanager
def spoiled_weights(ring: type[WeightRing] = WeightRing) -> Iterator[None]:
    """Rings that are made inside are of this kind, late and spoiled."""
    from sglang_hc.srt.model import offload

    with (
        mock.patch.object(offload, "WeightRing", partial(ring, spoil=True)),
        mock.patch.object(offload, "copy_stream_for", lambda *_: LateCopyStream()),
    ):
        yield


def hosted(core: Core) -> Any:
    """What an engine knows of its weights: `srt.model.offload.HostedWeights`."""
    return core.model_state.weights


def talk(core: Core, evict: bool, ours: bool = True) -> Told:
    """A conversation of some turns. evict: it leaves the device between them. ours: the engine has
    the tiers."""
    history, told = prompt(2, 230), Told([], [], [], [], {})
    for turn in range(TURNS):
        if turn and evict:
            core.push_out()
        reply = core.ask(history, 16)
        told.replies.append(reply.tokens)
        told.host.append(reply.host)
        done, history = history, [*history, *reply.tokens, *prompt(30 + turn, 11)]
    if ours:
        told.rows.extend(part.view(torch.uint8).numpy() for part in core.kv(done))
        core.settle()
        told.stats.update(core.tree.stats())
        told.hosted.extend(sorted(hosted(core)._numbers))
    return told


def plainly(model: str, dtype: str) -> Told:
    """By SGLang alone."""
    core = Core("--hc-disable", *SMALL, "--dtype", dtype, model=model, profile=None)
    return talk(core, evict=False, ours=False)


def kept(model: str, dtype: str, *flags: str) -> Told:
    """With the tiers, on the device all the time."""
    return talk(Core("--hc-forms", "kv", *SMALL, "--dtype", dtype, *flags, model=model), False)


def offloaded(
    model: str, dtype: str, plan: str, gib: str = ALL, ring: type[WeightRing] = WeightRing,
    *flags: str,
) -> Told:  # fmt: skip
    """With weights in host memory, and evicted between the turns."""
    with spoiled_weights(ring):
        core = Core(
            "--hc-offload-gb", gib, "--hc-forms", plan, *SMALL, "--dtype", dtype, *flags,
            model=model,
        )  # fmt: skip
    return talk(core, evict=True)
