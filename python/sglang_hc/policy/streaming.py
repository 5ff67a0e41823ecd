"""How state of running requests is kept in host memory: what a user says, and what is settled.

HybridServe 4.3: a share of the tokens is kept as hidden states (the paper's ACT), evenly within
each request; a part of these never leaves the device; requests attend in rounds (its mini-batches).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_hc.errors import ConfigError
from sglang_hc.policy.rounds import Surplus

AUTO = "auto"
"""A specification that leaves all to the plan."""

SPEC = "act:SHARE,rounds:N,device-act-gb:X,host-gb:Y,device-gb:Z"
"""What a specification looks like; each part may be left out."""


@dataclass(frozen=True)
class ThroughputSpec:
    """What a user forces; None is left to the plan. Sizes in GiB.

    act: share of tokens that are kept as hidden states, 0 to 1. rounds: in so many the requests of
    a full server attend, 1 or more.
    device_act_gb: hidden states that never leave the device. host_gb: host memory for state.
    device_gb: device memory for state: hidden states that stay, and the places for what crosses.
    """

    act: float | None = None
    rounds: int | None = None
    device_act_gb: float | None = None
    host_gb: float | None = None
    device_gb: float | None = None

    @classmethod
    def parse(cls, text: str) -> ThroughputSpec:
        """The specification that `text` spells: `auto`, or what `SPEC` shows, in any order. Raises
        ConfigError, which does not name the option."""
        if text == AUTO:
            return cls()
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, colon, value = part.partition(":")
            if not colon or name not in _READERS:
                raise ConfigError(f"{part!r} is not a part of {SPEC}; give some of these, or auto")
            if name in found:
                raise ConfigError(f"{name} is given more than once; give it once")
            found[name] = _READERS[name](name, value)
        return cls(**{name.replace("-", "_"): value for name, value in found.items()})

    def __str__(self) -> str:
        """The text that `parse` reads."""
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}
        parts = [f"{name}:{value!r}" for name, value in values.items() if value is not None]
        return ",".join(parts) or AUTO


UNMEASURED = Surplus(1.0, -1.0)


@dataclass(frozen=True)
class Streaming:
    """What is settled when a server starts.

    tokens: slots, each with a row in every layer; the first `act_tokens` of them are hidden states,
    and the first `device_act` of these have their row on the device, all others in host memory.
    rows: of each of the two places on the device: as many tokens as attend in one round. balance:
    by what requests are packed into rounds; unmeasured, K and V cost the link as much as hidden
    states cost the device.
    """

    tokens: int
    act_tokens: int
    device_act: int
    rows: int
    balance: Surplus = UNMEASURED

    def __post_init__(self) -> None:
        if not 0 <= self.device_act <= self.act_tokens <= self.tokens or self.rows < 1:
            raise ValueError(f"{self}: no such division of slots")

    @property
    def act(self) -> float:
        """Share of the tokens that are kept as hidden states."""
        return self.act_tokens / self.tokens if self.tokens else 0.0


def _share(name: str, text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}:{text}: give a share from 0 (K and V) to 1 (hidden states)")
    return value


def _count(name: str, text: str) -> int:
    value = _number(text)
    if not (1 <= value < math.inf and value == int(value)):
        raise ConfigError(f"{name}:{text}: give 1 or more rounds")
    return int(value)


def _zero_or_more(name: str, text: str) -> float:
    value = _number(text)
    if not 0 <= value < math.inf:
        raise ConfigError(f"{name}:{text}: give 0 or more GiB")
    return value


def _more(name: str, text: str) -> float:
    value = _number(text)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}:{text}: give more than 0 GiB")
    return value


def _number(text: str) -> float:
    """NaN, which no range holds, for what is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


_READERS: Mapping[str, Callable[[str, str], float | int]] = {
    "act": _share,
    "rounds": _count,
    "device-act-gb": _zero_or_more,
    "host-gb": _more,
    "device-gb": _more,
}
