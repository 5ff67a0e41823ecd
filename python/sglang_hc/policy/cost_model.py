"""What moving and computing one layer costs on this machine, in seconds (HCache 4.1.2).

A short probe at the start measures it on the device (`restore.probe`); for `sglang-hc plan` and the
simulator `tools.datasheet` derives one from data sheets. While the server runs it is corrected by
what restorations, reads and prefills really take: one factor for each resource (`correction.py`).
`profile_file` keeps both in a file.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan, StateShape
from sglang_hc.policy.correction import BOUND, WINDOW, Correction, Resource, told_apart
from sglang_hc.policy.fit import Fit, NonNegative, StepFit
from sglang_hc.policy.makespan import LayerTimes

LONG_HISTORY = 16384
"""Tokens of the paper's longest history. The fixed costs of a copy do not show in it."""


RATIOS_KEPT = 256
"""Observations that wait for whoever charts them (`CostModel.ratios`)."""


class SourceTier(enum.Enum):
    """Where a block is read from when it is restored."""

    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"

    # Tiers are keys for every block that is read, and Enum's own hash is a Python function.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class TierCopy:
    """Copy of one layer's tokens: from host memory onto the device, or from a lower tier into host
    memory, which they reach before they go on. hidden: None when there is no such form."""

    kv: Fit
    hidden: Fit | None = None


_UNIT = TierCopy(Fit(0.0, 1.0), Fit(0.0, 1.0))
"""A tier of which only a factor is known: seconds for a token of a layer, in either form."""

_READS = MappingProxyType({SourceTier.DISK: Resource.DISK, SourceTier.REMOTE: Resource.REMOTE})


@dataclass
class CostModel:
    """Seconds for one layer of one model on one machine, per rank.

    fingerprint: what the model was measured on; a server refuses another machine's profile.
    origin: "measured" or "data sheet".
    copies, prefill, project: as measured. copies: per tier that can be read. project: None when the
    model has no HIDDEN form.
    overlap: whether copies run beside the compute; False on a CPU, where one thread does both.
    ahead: seconds of copies from host memory that the staging frames hold, as measured.
    learned: by what each resource that was seen has to be multiplied. For a remote store that is
    not in `copies` it is the seconds for a token of a layer.
    weights: seconds that a layer's weights take from host memory, on average over all layers: so
    long a layer takes at least, in each pass. They share the link with the copies from host memory.
    0 where all weights are on the device. What is seen beside them corrects nothing.
    pass_tokens: of a prompt in one pass at most; None for all of it. It counts with `weights` only.
    step: of a decode step, a layer's share of all of it. passes: of a pass over prompts, a layer's
    share of all of it. head: what a pass over prompts takes outside of the layers, where that is
    known apart: embedding, LM head, scheduler. shape: of the model. Only `sglang-hc
    profile` measures these, for the simulator and for plans of streamed state.
    plan: the layer plan that was chosen by these costs, so that the next start keeps it while it is
    good: blocks under another plan are not found. None before it was chosen.

    The methods give the costs to decide by, which are corrected. Belongs to the scheduler thread.
    """

    fingerprint: Annotated[str, Meta(min_length=1)]
    origin: str
    copies: Annotated[Mapping[SourceTier, TierCopy], Meta(min_length=1)]
    prefill: Fit
    project: Fit | None = None
    overlap: bool = True
    ahead: NonNegative = math.inf
    learned: dict[Resource, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    plan: LayerPlan | None = None
    weights: NonNegative = 0.0
    pass_tokens: Annotated[int, Meta(gt=0)] | None = None
    step: StepFit | None = None
    passes: Fit | None = None
    head: NonNegative = 0.0
    shape: StateShape | None = None

    def __post_init__(self) -> None:
        self.learned = dict(self.learned)  # `replace` makes a model that learns on its own
        self.changes = 0
        """How often a factor has changed by much (`correction.STEP`)."""
        self.ratios: deque[tuple[Resource, float]] = deque(maxlen=RATIOS_KEPT)
        """Expected over observed seconds of the newest observations, with a resource of each."""
        self._shared: dict[tuple[Resource, Resource], deque[tuple[float, float]]] = {}
        """Of the last times that two resources shared, their parts as measured, as shares of it."""
        self._corrections = {
            resource: Correction(self.learned.get(resource, 1.0)) for resource in Resource
        }
        if SourceTier.REMOTE not in self.copies:
            known = self.learned.get(Resource.REMOTE)
            self._corrections[Resource.REMOTE] = Correction(known, bound=math.inf)
        for tier, copy in self.copies.items():
            if (copy.hidden is None) != (self.project is None):
                raise ConfigError(
                    f"cost model of {self.fingerprint}: the copy of hidden states from "
                    f"{tier.value} and their projection must both be known, or neither"
                )

    def copy_stored(self, tier: SourceTier, stored: LayerPlan, tokens: int) -> float:
        """Seconds for all stored layers of `tokens` tokens, see `TierCopy`.

        Raises KeyError for a tier that the model has no costs for.
        """
        seconds = stored.kv * self.copy_kv(tier, tokens)
        return seconds + (stored.hidden * self.copy_hidden(tier, tokens) if stored.hidden else 0.0)

    def copy_hidden(self, tier: SourceTier, tokens: int) -> float:
        """Seconds for `tokens` hidden states of a layer, see `TierCopy`; infinite without a HIDDEN
        form."""
        line = self._tier(tier).hidden
        if line is None or self.project is None:
            return math.inf
        return line.seconds(tokens) * self._factor(_READS.get(tier, Resource.HIDDEN_COPY))

    def copy_kv(self, tier: SourceTier, tokens: int) -> float:
        """Seconds for the K and V of `tokens` tokens of a layer, see `TierCopy`."""
        factor = self._factor(_READS.get(tier, Resource.KV_COPY))
        return self._tier(tier).kv.seconds(tokens) * factor

    def project_kv(self, tokens: int) -> float:
        """Seconds from hidden states to K and V in the pool; infinite without a HIDDEN form."""
        if self.project is None:
            return math.inf
        return self.project.seconds(tokens) * self._factor(Resource.PROJECTION)

    def prefill_layer(self, new: int, context: int) -> float:
        """Seconds to run one layer over `new` tokens behind `context` tokens."""
        other = self._factor(Resource.PREFILL)
        attention = self.prefill.attention(new, context)
        whole = self.prefill.seconds(new, context)
        computing = whole * other + attention * (self._factor(Resource.ATTENTION) - other)
        if not computing:
            return 0.0
        coming = self._weights_of(new)
        return max(computing, coming) if self.overlap else computing + coming

    def prefill_batch(self, lengths: Sequence[tuple[int, int]], rows: int = 0) -> float:
        """Seconds to run one layer over several (new, context) in one pass, and over `rows` tokens
        more whose attention counts elsewhere."""
        attention, rest = self.prefill.batch([*lengths, (rows, 0)] if rows else lengths)
        return rest * self._factor(Resource.PREFILL) + attention * self._factor(Resource.ATTENTION)

    def _weights_of(self, new: int) -> float:
        """Seconds that a layer's weights take to come for all passes over `new` tokens."""
        return self.weights * math.ceil(new / (self.pass_tokens or max(1, new)))

    def knows(self, tier: SourceTier) -> bool:
        """Whether there are costs of a tier: a remote store's are learned from its reads."""
        is_learned = tier is SourceTier.REMOTE and Resource.REMOTE in self.learned
        return is_learned or tier in self.copies

    def layer_times(
        self, tier: SourceTier, tokens: int, *, context: int = 0, new: int = 0, start: float = 0.0
    ) -> LayerTimes:
        """Times to restore `tokens` behind `context` tokens that are on the device, when their
        copies begin at `start`. What comes from a lower tier is copied twice.

        Raises KeyError for a tier that the model has no costs for.
        """
        host = SourceTier.HOST
        copy_hidden, copy_kv = self.copy_hidden(host, tokens), self.copy_kv(host, tokens)
        if tier is not host:
            copy_hidden += self.copy_hidden(tier, tokens)
            copy_kv += self.copy_kv(tier, tokens)
        weights = 0.0
        if self.overlap:  # else one thread does both, and the weights count with the layer
            copy_hidden += self.weights
            copy_kv += self.weights
            weights = self._weights_of(tokens) + self._weights_of(new)
        return LayerTimes(
            copy_hidden=copy_hidden,
            copy_kv=copy_kv,
            project=self.project_kv(tokens),
            recompute=self.prefill_layer(tokens, context),
            new=self.prefill_layer(new, context + tokens),
            start=start,
            overlap=self.overlap,
            ahead=self.ahead * self._factor(Resource.KV_COPY),
            weights=weights,
        )

    # -- what is learned while the server runs ---------------------------------------------------

    def observe(self, parts: Mapping[Resource, float], seconds: float) -> None:
        """Work that uses these one or two resources alone took `seconds`. parts: what each of them
        takes of it as measured at the start, without what was learned. Times that are not positive
        and finite say nothing and are ignored.
        """
        if self.weights and not parts.keys() <= set(_READS.values()):
            return
        expected = sum(part * self._factor(resource) for resource, part in parts.items())
        if not (0.0 < expected < math.inf and 0.0 < seconds < math.inf):
            return
        self.ratios.append((next(iter(parts)), min(expected / seconds, BOUND**2)))
        for resource, factor in self._factors_seen(parts, seconds).items():
            correction = self._corrections[resource]
            steps = correction.steps
            self.learned[resource] = correction.observe(factor)
            self.changes += correction.steps - steps

    def _factors_seen(
        self, parts: Mapping[Resource, float], seconds: float
    ) -> dict[Resource, float]:
        if len(parts) == 1:
            ((resource, part),) = parts.items()
            return {resource: seconds / part}
        if not BOUND**-2 < seconds / sum(parts.values()) < BOUND**2:
            return {}  # nonsense, which would spoil what is found in its neighbours
        one, other = sorted(parts, key=lambda resource: resource.value)
        times = self._shared.setdefault((one, other), deque(maxlen=WINDOW))
        times.append((parts[one] / seconds, parts[other] / seconds))
        ones, others = self._factor(one), self._factor(other)
        by_one, by_other = told_apart([(a * ones, b * others) for a, b in times])
        return {one: ones * by_one, other: others * by_other}

    def observe_read(self, plan: LayerPlan, tier: SourceTier, blocks: int, seconds: float) -> None:
        """So many blocks of `plan` came from an idle disk or remote store in `seconds`."""
        if tier in self.copies or tier is SourceTier.REMOTE:
            copy, tokens = self.copies.get(tier, _UNIT), blocks * BLOCK_TOKENS
            expected = plan.kv * copy.kv.seconds(tokens)
            if plan.hidden and copy.hidden is not None:
                expected += plan.hidden * copy.hidden.seconds(tokens)
            self.observe({_READS[tier]: expected}, seconds)

    def levels(self) -> dict[str, float]:
        """For /server_info and the metrics: the factor in force of each resource that was seen;
        below 1 the profile says slower than it is."""
        return {
            f"cost_correction_{resource.value}": round(factor, 4)
            for resource, factor in self.learned.items()
            if resource is not Resource.REMOTE
        }

    def counts(self) -> dict[str, int]:
        """Observations by resource, and how often a factor changed by much."""
        found = {
            f"cost_observations_{resource.value}": correction.observations
            for resource, correction in self._corrections.items()
        }
        return {**found, "cost_corrections": self.changes}

    def _factor(self, resource: Resource) -> float:
        return self.learned.get(resource, 1.0)

    def _tier(self, tier: SourceTier) -> TierCopy:
        if not self.knows(tier):
            known = ", ".join(known.value for known in self.copies)
            raise KeyError(f"no costs for tier {tier.value}, only for {known}")
        return self.copies.get(tier, _UNIT)
