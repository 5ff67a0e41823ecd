"""Engines whose running requests have their state in host memory, on late copies.

Rows come to the "device" when somebody waits for them and not before (`LateCopyStream`), go home as
late, and places and rows of free slots are full of NaN until then (`support.spoiled_units`).
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

from sglang_hc.hybrid.units import Units
from support.copy_streams import LateCopyStream
from support.core import Core
from support.offloading import ALL, spoiled_weights
from support.prompts import prompt
from support.spoiled_units import SpoiledUnits

TOKENS = 640
CONTEXT = 200
FLAGS = (
    *("--max-total-tokens", str(TOKENS), "--context-length", str(CONTEXT)),
    *("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--disable-overlap-schedule"),
)
"""Of both, so that their passes have the same rows: in bfloat16 products depend on how many."""
SOME = "device-act-gb:0.0004"
"""Hidden states of about a hundred tokens of a tiny model."""


class Told(NamedTuple):
    """replies: of all requests in turn. cached: tokens of each turn of a conversation that SGLang's
    tree had. rows: K and V of the conversation, per layer and part, as arrays of bytes."""

    replies: list[list[int]]
    cached: list[int]
    rows: list[Any]


class Streams(NamedTuple):
    """Of an engine, what passed. rounds: most in a pass."""

    passed: Any
    rounds: int


def flags_of(spec: str, dtype: str = "float32", *more: str) -> tuple[str, ...]:
    return ("--hc-offload-gb", ALL, "--hc-throughput", spec, "--dtype", dtype, *FLAGS, *more)


@contextlib.contextmanager
def spoiled_places(kind: type[Units] = SpoiledUnits) -> Iterator[None]:
    """Engines that are made inside have units of this kind, and late copies."""
    from sglang_hc.srt.hybrid import build

    with (
        spoiled_weights(),
        mock.patch.object(build, "Units", kind),
        mock.patch.object(build, "copy_stream_for", lambda *_: LateWays()),
    ):
        yield


class LateWays(LateCopyStream):
    """Late copies, both ways."""

    def __init__(self, other: LateWays | None = None) -> None:
        super().__init__()
        self._other = other

    def opposite(self) -> LateWays:
        self._other = self._other or LateWays(self)
        return self._other


def streamed(
    model: str, spec: str, *more: str, dtype: str = "float32", kind: type[Units] = SpoiledUnits
) -> Core:
    """Slots that are given back are spoiled."""
    with spoiled_places(kind):
        core = Core(*flags_of(spec, dtype, *more), model=model)
    allocator, units = core.scheduler.token_to_kv_pool_allocator, units_of(core)
    streaming = backend_of(core).streamed.streaming
    give_back = allocator.slots.give_back

    def spoiling(slots: Any) -> None:
        give_back(slots)
        units.forget(slots.tolist(), streaming.act_tokens, streaming.device_act)

    allocator.slots.give_back = spoiling
    return core


def backend_of(core: Core) -> Any:
    return core.scheduler.tp_worker.model_runner.attn_backend


def units_of(core: Core) -> Any:
    return backend_of(core).units


def plain(model: str, dtype: str, *more: str) -> Core:
    """SGLang alone."""
    return Core("--hc-disable", "--dtype", dtype, *FLAGS, *more, model=model, profile=None)


def talk(core: Core) -> Told:
    """Requests at once, two of which share a prefix; a conversation; one of three that is aborted;
    and the first ones again when their state is gone."""
    shared = prompt("shared", 70)
    prompts = [[*shared, *prompt(n, 50)] for n in range(2)] + [prompt(n, 90) for n in range(2, 5)]
    replies = _at_once(core, prompts)
    history, cached = prompt(9, 70), []
    for turn in range(3):
        reply = core.ask(history, 12)
        cached.append(reply.cached)
        replies.append(reply.tokens)
        done, history = history, [*history, *reply.tokens, *prompt(30 + turn, 11)]
    rows = rows_of(core, done)
    rids = [core.submit(prompt(20 + n, 80), 16) for n in range(3)]
    core.run(steps=8)
    core.abort(rids[1])
    core.run()
    replies += [core.reply(rid).tokens for rid in (rids[0], rids[2])]
    core.ask(prompt(40, CONTEXT - 20), 1)
    core.evict()
    replies += _at_once(core, prompts[:2])
    core.check_device()
    return Told(replies, cached, rows)


def _at_once(core: Core, prompts: Sequence[list[int]], new: int = 12) -> list[list[int]]:
    rids = [core.submit(tokens, new) for tokens in prompts]
    core.run()
    return [core.reply(rid).tokens for rid in rids]


def crowd(core: Core, count: int) -> list[list[int]]:
    """Many short requests at once."""
    return _at_once(core, [prompt(n, 20 + n % 50) for n in range(count)], 8)


def rows_of(core: Core, tokens: Sequence[int]) -> list[Any]:
    """K and V of a prefix that SGLang's tree has, per layer and part as arrays of bytes: from its
    pool, or from host memory; none for tokens that are kept as hidden states."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", tokens), None)
    found = core.tree.match_prefix(MatchPrefixParams(key=key))
    slots = core.tree.path_device_indices(found.last_device_node)
    pool = core.scheduler.token_to_kv_pool_allocator.get_kvcache()
    if not hasattr(pool, "places"):
        parts = [part for layer in zip(pool.k_buffer, pool.v_buffer, strict=True) for part in layer]
        return [part[slots].flatten(1).view(torch.uint8).numpy() for part in parts]
    units, streaming = units_of(core), backend_of(core).streamed.streaming
    units._out.close()
    rows = slots[slots > streaming.act_tokens] - 1 - streaming.act_tokens
    mirror = units._mirror
    return [part[layer][rows].numpy() for layer in range(mirror.layers) for part in mirror.parts]
