"""Measured costs, corrected by what the server sees while it runs.

A profile is measured once, perhaps while something else used the machine. Each restoration, read
and prefill then tells how long one resource really took. Here the quotient of observed and
predicted seconds becomes one factor per resource, and the decisions use the cost model times these
factors.

A factor follows the median of the last WINDOW quotients, PRIOR of which are the profile itself
(quotient 1) at the beginning. So a single slow pass changes nothing, and three agreeing
observations do. A factor moves only when the median has left the band of DEAD_BAND around the
factor in force: as long as the observations lie within the band around the profile, the cost model
in force *is* the profile and no decision changes. A factor never leaves [1/BOUND, BOUND].

Pure: no clock, no randomness. The same observations give the same factors.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit

WINDOW = 7
"""Quotients that count, the newest. Four of them must agree to move a factor for good."""

PRIOR = 2
"""Quotients of 1 that the window begins with: what the measurement at the start is worth."""

DEAD_BAND = 1.3
"""A median within this ratio of the factor in force changes nothing."""

BOUND = 16.0
"""Largest factor, and the reciprocal of the smallest. A profile that is further off than this is
corrected as far as the bound."""


class Resource(enum.Enum):
    """What is timed on its own."""

    KV_COPY = "kv_copy"
    """K and V from host memory into the device pool."""
    HIDDEN_COPY = "hidden_copy"
    """Hidden states from host memory onto the device."""
    PROJECTION = "projection"
    """Hidden states to K and V."""
    PREFILL = "prefill"
    """Layers run over tokens; also what recomputing costs."""
    DISK = "disk"
    """Blocks from disk into host memory."""


class _Factor:
    """One resource's factor, in logarithms. It is 0 without a `prior` until something was seen."""

    def __init__(self, prior: int = PRIOR, bound: float = BOUND) -> None:
        self._recent: deque[float] = deque([0.0] * prior, WINDOW)
        self._limit = math.log(bound)
        self._in_force = 0.0 if prior else -math.inf
        self.observations = 0

    @property
    def value(self) -> float:
        """The factor in force."""
        return math.exp(self._in_force)

    def add(self, quotient: float) -> bool:
        """Returns whether the factor in force has changed."""
        self._recent.append(max(-self._limit, min(self._limit, math.log(quotient))))
        self.observations += 1
        median = statistics.median(self._recent)
        if abs(median - self._in_force) <= math.log(DEAD_BAND):
            return False
        self._in_force = median
        return True


class CorrectedCosts:
    """A cost model that learns.

    measured: the profile, unchanged. model: the costs to decide by; the very object `measured`
    while no factor is in force. changes: how often `model` was replaced.
    """

    def __init__(self, measured: CostModel) -> None:
        self.measured = measured
        self.model = measured
        self.changes = 0
        self._factors = {resource: _Factor() for resource in Resource}
        self._remote = _Factor(prior=0, bound=math.inf)
        """Seconds for a token of a layer from a remote store, of which no profile knows."""

    def observe(self, resource: Resource, predicted: float, observed: float) -> None:
        """Something that uses this resource alone took `observed` seconds; by `measured` it takes
        `predicted`. Times that are not positive and finite say nothing and are ignored: a profile
        by which something is free cannot be corrected by a factor.
        """
        self._observe(self._factors[resource], predicted, observed)

    def observe_remote(self, seconds: float) -> None:
        """One token of one stored layer came from a remote store in `seconds`. Times that are not
        positive and finite are ignored."""
        self._observe(self._remote, 1.0, seconds)

    def observe_read(self, plan: LayerPlan, tier: SourceTier, blocks: int, seconds: float) -> None:
        """So many blocks of `plan` came from an idle disk or remote store in `seconds`."""
        tokens = blocks * BLOCK_TOKENS
        if tier is SourceTier.REMOTE:
            self.observe_remote(seconds / (tokens * (plan.hidden + plan.kv)))
        elif tier in self.measured.copies:
            predicted = self.measured.copy_stored(tier, plan, tokens)
            self.observe(Resource.DISK, predicted, seconds)

    def factor(self, resource: Resource) -> float:
        """What `measured` is multiplied by now."""
        return self._factors[resource].value

    def levels(self) -> dict[str, float]:
        """For /server_info and the metrics: the factor in force of each resource that was seen;
        below 1 the profile says slower than it is."""
        return {
            f"cost_correction_{resource.value}": round(self.factor(resource), 4)
            for resource, factor in self._factors.items()
            if factor.observations
        }

    def counts(self) -> Mapping[str, int]:
        """Observations by resource, and how often a factor changed."""
        found = {
            f"cost_observations_{resource.value}": factor.observations
            for resource, factor in self._factors.items()
        }
        found["cost_observations_remote"] = self._remote.observations
        return {**found, "cost_corrections": self.changes}

    # -- the corrected model ---------------------------------------------------------------------

    def _observe(self, factor: _Factor, predicted: float, observed: float) -> None:
        seen = 0.0 < predicted < math.inf and 0.0 < observed < math.inf
        if seen and factor.add(observed / predicted):
            self.changes += 1
            self.model = self._corrected()

    def _corrected(self) -> CostModel:
        cost = self.measured
        project = cost.project
        if project is not None:
            project = project.scaled(self.factor(Resource.PROJECTION))
        copies = {tier: self._copy(tier) for tier in cost.copies}
        if self._remote.value:
            line = Fit(0.0, self._remote.value)
            copies[SourceTier.REMOTE] = TierCopy(line, line if project is not None else None)
        return replace(
            cost,
            copies=copies,
            prefill=cost.prefill.scaled(self.factor(Resource.PREFILL)),
            project=project,
            ahead=cost.ahead * self.factor(Resource.KV_COPY),
        )

    def _copy(self, tier: SourceTier) -> TierCopy:
        copy = self.measured.copies[tier]
        kv, hidden = self.factor(Resource.KV_COPY), self.factor(Resource.HIDDEN_COPY)
        if tier is not SourceTier.HOST:
            kv = hidden = self.factor(Resource.DISK) if tier is SourceTier.DISK else 1.0
        return TierCopy(copy.kv.scaled(kv), copy.hidden and copy.hidden.scaled(hidden))
