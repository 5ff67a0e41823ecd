"""What one pass takes when weights, or the state of running requests, cross the link in it.

The model (HybridServe 4.3, with what its equations leave out):

- A pass runs one token of each running request, and prompts, through all layers.
- The link carries, one after the other, the weights of every layer that is not resident, and what
  host memory keeps of the running requests, as K and V or as hidden states (the paper's ACT). What
  goes home crosses in the other direction at the same time, and counts nothing.
- The device runs the new tokens (the step) and turns hidden states into K and V.
- Both work at the same time, so a pass takes as long as the one that works longer. Where weights
  are not copied ahead it takes both.
- State that crosses shares two places on the device, each of which holds one round: as many
  requests as attend at once in a layer. Weights that cross share two places as well.

All times are linear in tokens, as the paper samples them (4.3), so plans over them are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PLACES = 2
"""Places on the device for what crosses: one is used while the other is filled."""

ROUND_SECONDS = 100e-6
"""Host work that a round adds to a layer, whose kernels are launched one by one."""

BALANCED = 0.03
"""Link and device are called balanced when their work differs by less than this share."""


class Load(NamedTuple):
    """What a pass runs.

    requests: running ones. tokens: that their state has, all together, on average. new: tokens that
    pass through the layers. pairs: of a token of a prompt and one before it that it attends to.
    """

    requests: int
    tokens: float
    new: float
    pairs: float = 0.0


def steady(requests: int, context: int, output: int) -> Load:
    """Passes of a server that always runs so many requests of `context` prompt tokens and `output`
    answer tokens: whenever one ends another begins, and its prompt is a part of the pass."""
    begun = requests / output
    return Load(
        requests,
        tokens=requests * (context + output / 2),
        new=requests + begun * context,
        pairs=begun * context * context / 2,
    )


class Split(NamedTuple):
    """Where state and weights are. The first four are tokens of a pass, of all layers: as K and V
    in host memory, as hidden states there, as hidden states on the device, as K and V on the
    device. resident: layers whose weights stay on the device, spread evenly."""

    host_kv: float = 0.0
    host_act: float = 0.0
    device_act: float = 0.0
    device_kv: float = 0.0
    resident: int = 0

    @property
    def act(self) -> float:
        """Tokens that are kept as hidden states."""
        return self.host_act + self.device_act

    @property
    def crossing(self) -> float:
        """Tokens whose K and V pass through the places. Hidden states that are on the device are
        projected into them, too."""
        return self.host_kv + self.act

    @property
    def tokens(self) -> float:
        return self.crossing + self.device_kv


class PassTimes(NamedTuple):
    """Seconds that the link and the device work in one pass."""

    link: float
    compute: float

    @property
    def ahead(self) -> float:
        """Seconds of the pass when copies run ahead of their layers."""
        return max(self)

    @property
    def in_line(self) -> float:
        """Seconds of the pass when each layer waits for its copies."""
        return sum(self)

    @property
    def bound(self) -> str:
        """What works longer: `link`, `compute`, or `balanced`."""
        if abs(self.link - self.compute) <= BALANCED * max(self):
            return "balanced"
        return "link" if self.link > self.compute else "compute"


@dataclass(frozen=True)
class StreamedModel:
    """One model on one machine, as a pass sees it.

    weights, kv, act: bytes of one layer: its weights, K and V of a token, hidden state of a token.
    load_w, load_kv, load_act: seconds to copy each of them to the device (the paper's T_load_w,
    T_load_kv, and one that it leaves out). kv_gen: seconds to make K and V of a hidden state
    (T_kv_gen), infinite for a model that has no such form.
    read_w, read_kv: seconds to read a layer's weights, and K and V of a token, from device memory.
    per_new, per_pair: seconds of a layer for a new token, and for a pair of a prompt.
    per_round: seconds that each round adds to a layer. outside: seconds of a pass outside of its
    layers, as for the output layer.
    active: share of a layer's weights that one token passes through.
    host, device: bytes for the layers' weights and for state.
    """

    layers: int
    weights: float
    kv: float
    act: float
    load_w: float
    load_kv: float
    load_act: float
    kv_gen: float
    read_w: float
    read_kv: float
    per_new: float
    per_pair: float
    per_round: float
    outside: float
    active: float
    host: float
    device: float

    def step(self, load: Load) -> float:
        """Seconds of one layer without rounds and hidden states."""
        read = self.read_w * min(1.0, load.new * self.active)
        products = self.per_new * load.new + self.per_pair * load.pairs
        return max(read, products) + self.read_kv * load.tokens

    def times(self, load: Load, split: Split, rounds: int = 1) -> PassTimes:
        """Seconds that link and device work in a pass."""
        loads = self.load_kv * split.host_kv + self.load_act * split.host_act
        compute = self.step(load)
        if split.act:
            compute += self.kv_gen * split.act
        if split.crossing:
            compute += self.per_round * rounds
        link = (self.layers - split.resident) * self.load_w + self.layers * loads
        return PassTimes(link, self.layers * compute + self.outside)

    def ring(self, resident: int) -> float:
        """Bytes on the device of the places of weights that cross."""
        return self.weights * min(PLACES, self.layers - resident)

    def places(self, tokens: float, rounds: int) -> float:
        """Bytes on the device of the places of state that crosses: K and V of a round each."""
        return PLACES * self.kv * tokens / rounds

    def host_bytes(self, split: Split) -> float:
        """Bytes of host memory that a split takes."""
        state = self.kv * split.host_kv + self.act * split.host_act
        return (self.layers - split.resident) * self.weights + self.layers * state

    def device_bytes(self, split: Split, rounds: int = 1) -> float:
        """Bytes of device memory that a split takes."""
        state = self.kv * split.device_kv + self.act * split.device_act
        fixed = split.resident * self.weights + self.ring(split.resident)
        return fixed + self.layers * state + self.places(split.crossing, rounds)

    def fits(self, split: Split, rounds: int = 1) -> bool:
        """Whether host and device have room for a split; rounding is allowed for."""
        room = 1 + 1e-9
        host, device = self.host_bytes(split), self.device_bytes(split, rounds)
        return host <= self.host * room and device <= self.device * room
