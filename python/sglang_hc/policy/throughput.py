"""Ways to serve a model that is larger than the device, each at its best batch, by one model of a
pass (`streamed_pass`).

- `sglang`: some layers lie in host memory, and each waits in line for its weights; state is on the
  device (SGLang's `--cpu-offload-gb`)
- `ahead`: the same, but weights are copied while the layers before them run
- `kv`: state crosses too, as K and V
- `act`: state is kept as hidden states, on the device as far as there is room
- `hybrid`: as both (HybridServe)

Beside them, for comparison: a CPU computes the layers that do not fit on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from sglang_hc.policy.hybrid import best_split
from sglang_hc.policy.streamed_pass import PLACES, Load, PassTimes, Split, StreamedModel, steady

ROUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of rounds that are tried."""

DEFAULT_CONTEXT, DEFAULT_OUTPUT = 1024, 128
"""Tokens of a prompt and of an answer where nobody says."""

CPU_GBPS, CPU_TFLOPS = 75.0, 1.5
"""Host memory and products of the CPU that ways are compared with: assumptions."""

ACT_SHARES: Mapping[str, float | None] = {"kv": 0.0, "act": 1.0, "hybrid": None}
"""Ways whose state crosses, and the share of it that is hidden states; None for the best."""


class Processor(NamedTuple):
    """A CPU that computes layers. memory: bytes/s that it reads. per_new: seconds of products of
    one layer for a token."""

    memory: float
    per_new: float


class Requests(NamedTuple):
    """The requests that are served: tokens of each prompt and of each answer."""

    context: int
    output: int


@dataclass(frozen=True)
class Served:
    """One way to serve, with one batch. seconds: of a pass, which brings each running request one
    token."""

    way: str
    load: Load
    split: Split
    rounds: int
    times: PassTimes

    @property
    def seconds(self) -> float:
        return self.times.in_line if self.way == "sglang" else self.times.ahead

    @property
    def tokens_per_second(self) -> float:
        """Generated ones; the work for their prompts is counted."""
        return self.load.requests / self.seconds


@dataclass(frozen=True)
class Ways:
    """What one model on one machine can do for requests, without and with a CPU that computes.

    most_resident: at most so many layers are on the device where state crosses. most: running
    requests at most. None for any number. most_on_device: hidden states that stay on the device at
    most, in tokens.
    """

    model: StreamedModel
    requests: Requests
    cpu: Processor
    most_resident: int | None = None
    most: int | None = None
    most_on_device: float = math.inf

    @property
    def names(self) -> tuple[str, ...]:
        """Ways that this model has; a model whose K and V are not made of hidden states has no
        `act` and no `hybrid`."""
        hidden = math.isfinite(self.model.kv_gen)
        return ("sglang", "ahead", *(way for way in ACT_SHARES if hidden or way == "kv"))

    def serve(self, way: str, batch: int) -> Served | None:
        """A way with so many running requests; None when they do not fit."""
        if way in ACT_SHARES:
            return self.stream(batch, ACT_SHARES[way], way=way)
        return self._kept(way, steady(batch, *self.requests))

    def best(self, way: str) -> Served | None:
        """A way with the batch that generates most; None when not even one request fits."""
        return self._best(partial(self.serve, way))

    def best_stream(
        self, act: float | None = None, rounds: Sequence[int] = ROUNDS
    ) -> Served | None:
        """State crosses, with the batch that generates most; see `stream`. Fewer requests than
        rounds have one each."""
        return self._best(
            lambda batch: self.stream(batch, act, sorted({min(one, batch) for one in rounds}))
        )

    def best_cpu(self) -> int:
        """The batch with which a CPU that computes the rest generates most; see `cpu_seconds`."""
        return best_batch(lambda batch: math.inf if self._many(batch) else self.cpu_seconds(batch))

    def _best(self, serve: Callable[[int], Served | None]) -> Served | None:
        def seconds(batch: int) -> float:
            served = None if self._many(batch) else serve(batch)
            return math.inf if served is None else served.seconds

        return serve(best_batch(seconds))

    def _many(self, batch: int) -> bool:
        return self.most is not None and batch > self.most

    def cpu_seconds(self, batch: int) -> float:
        """A pass in which a CPU computes the layers that do not fit; infinite when host memory does
        not hold them and their state.

        The CPU reads weights and state or computes products, whichever takes longer. It sees no
        prompts: for them the weights of its layers cross once for all that are running.
        """
        model, load = self.model, steady(batch, *self.requests)
        layer = model.weights + model.kv * load.tokens
        resident = min(model.layers, int(max(0.0, model.device) / layer))
        others = model.layers - resident
        if others * layer > model.host:
            return math.inf
        answers = load._replace(new=batch, pairs=0.0)
        read = model.weights * min(1.0, batch * model.active) + model.kv * load.tokens
        computed = max(read / self.cpu.memory, self.cpu.per_new * batch)
        crossing = others * model.load_w / self.requests.output
        prompts = model.per_new * (load.new - batch) + model.per_pair * load.pairs
        prefill = max(crossing, model.layers * prompts)
        step = resident * model.step(answers) + others * computed
        return step + prefill + model.outside

    def cpu_faster_below(self, most: int) -> int:
        """The smallest batch up to `most` with which no CPU is faster than all of these ways; one
        more when it is faster with all of them."""

        def loses(batch: int) -> bool:
            served = (self.serve(way, batch) for way in self.names)
            ours = min((one.seconds for one in served if one is not None), default=math.inf)
            return self.cpu_seconds(batch) < ours

        low, high = 1, 1
        while high <= most and loses(high):
            low, high = high + 1, 2 * high
        high = min(high, most + 1)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if loses(middle) else (low, middle)
        return low

    def _kept(self, way: str, load: Load) -> Served | None:
        """State stays on the device. As many layers are resident as have room beside it."""
        model = self.model
        free = (model.device - model.layers * model.kv * load.tokens) / model.weights
        resident = model.layers if free >= model.layers else max(0, int(free - PLACES))
        split = Split(device_kv=load.tokens, resident=resident)
        if not model.fits(split):
            return None
        return Served(way, load, split, 1, model.times(load, split))

    def stream(
        self, batch: int, act: float | None, rounds: Sequence[int] = ROUNDS, way: str = "hybrid"
    ) -> Served | None:
        """State crosses, in that of `rounds` that is fastest; None when it does not fit. act: the
        share of tokens that are hidden states; None for the best."""
        load, found = steady(batch, *self.requests), []
        for number in rounds:
            split = None
            if number <= load.requests:
                split = best_split(
                    self.model,
                    load,
                    number,
                    act=act,
                    most_resident=self.most_resident,
                    most_on_device=self.most_on_device,
                )
            if split is not None:
                times = self.model.times(load, split, number)
                found.append(Served(way, load, split, number, times))
        return min(found, key=lambda one: (one.seconds, one.rounds), default=None)


def best_batch(seconds: Callable[[int], float]) -> int:
    """The batch that generates most tokens a second, by the seconds of its pass; infinite seconds
    mean that it does not fit. 1 when none fits.

    Batches double up to the last one that fits; from the best of them the search climbs in
    ever smaller steps.
    """

    @cache
    def rate(batch: int) -> float:
        return batch / seconds(batch) if batch > 0 else 0.0

    batch, doubled = 1, 1
    while rate(doubled) > 0:
        batch, doubled = max(batch, doubled, key=rate), 2 * doubled
    step = batch
    while step:
        higher = max(batch, batch - step, batch + step, key=rate)
        if higher == batch:
            step //= 2
        batch = higher
    return batch
