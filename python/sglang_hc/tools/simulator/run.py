"""One simulation from its settings to its numbers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_hc.policy.eviction import POLICIES
from sglang_hc.queue.lookahead import EVICTION_STRETCH
from sglang_hc.tools.simulator.clairvoyant import BeladyPolicy, Oracle, replay
from sglang_hc.tools.simulator.engine import Engine, Event
from sglang_hc.tools.simulator.jobs import Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.models import (
    ATTENTIONSTORE_MACHINE,
    GpuCosts,
    Machine,
    SimulatedModel,
)
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes
from sglang_hc.tools.workloads.sessions import Workload

SIMULATED_POLICIES = (*POLICIES, "fifo", "belady")

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Setup:
    """A server and its load.

    policy: one of SIMULATED_POLICIES. prefetch: None for the policy's own, queue for `queue` and
    `belady`, off for the others (AttentionStore section 4.3.3). overflow: one of
    `jobs.OVERFLOW_MODES`. stretch: eviction window over the paper's. Sizes in bytes.
    """

    workload: Workload
    model: SimulatedModel
    dram: float
    disk: float
    device: float = 0.0
    policy: str = "queue"
    prefetch: str | None = None
    machine: Machine = ATTENTIONSTORE_MACHINE
    max_batch: int = 24
    ready_first: bool = False
    overflow: str = "off"
    stretch: float = EVICTION_STRETCH

    @property
    def prefetch_mode(self) -> str:
        return self.prefetch or ("queue" if self.policy in ("queue", "belady") else "off")

    @property
    def sizes(self) -> TierSizes:
        """Blocks per tier."""
        slot = self.model.slot_bytes
        return TierSizes(int(self.device // slot), int(self.dram // slot), int(self.disk // slot))


@dataclass(frozen=True)
class Result:
    """seconds: wall clock of the simulation itself."""

    setup: Setup
    measures: Measures
    events: list[Event]
    seconds: float
    host_evictions: int
    disk_evictions: int

    def as_json(self) -> dict[str, object]:
        """Measures, settings and the wall clock; sizes in 1e9 bytes."""
        setup = self.setup
        return {
            **self.measures.as_json(),
            "seconds": self.seconds,
            "policy": setup.policy,
            "prefetch": setup.prefetch_mode,
            "window_stretch": setup.stretch,
            "overflow": setup.overflow,
            "workload": setup.workload.name,
            "model": setup.model.name,
            "layer_plan": str(setup.model.layout.plan),
            "token_bytes": setup.model.token_bytes,
            "dram_gb": setup.dram / 1e9,
            "disk_gb": setup.disk / 1e9,
            "hbm_gb": setup.device / 1e9,
            "host_evictions": self.host_evictions,
            "disk_evictions": self.disk_evictions,
        }


def simulate(setup: Setup, progress: Progress | None = None) -> Result:
    """Run it. The clairvoyant policy takes two passes over the same record of events.

    `progress` is called with the number of turns served in the pass under way.
    """
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()  # millions of live objects, no cycles among the dead: collecting finds nothing
    try:
        if setup.policy == "belady":
            measures, cache, events = _clairvoyant(setup, progress)
        else:
            measures, cache, events = _live(setup, setup.policy, progress)
    finally:
        if collecting:
            gc.enable()
    return Result(
        setup,
        measures,
        events,
        time.perf_counter() - start,
        cache.host.evicted_blocks if cache.host else 0,
        cache.disk.evicted_blocks if cache.disk else 0,
    )


def _live(
    setup: Setup, policy: str, progress: Progress | None
) -> tuple[Measures, TieredCache, list[Event]]:
    costs = GpuCosts(setup.model, setup.machine)
    cache = TieredCache(
        setup.sizes,
        costs,
        policy=policy,
        prefetch=setup.prefetch_mode,
        stretch=setup.stretch,
    )
    engine = Engine(
        setup.workload,
        cache,
        costs,
        setup.max_batch,
        setup.ready_first,
        setup.overflow,
        progress,
    )
    return engine.run(), cache, engine.events


def _clairvoyant(
    setup: Setup, progress: Progress | None
) -> tuple[Measures, TieredCache, list[Event]]:
    """What `queue` did, in the same order, with knowledge of all that follows."""
    _, _, events = _live(setup, "queue", progress)
    costs = GpuCosts(setup.model, setup.machine)
    overflow = Overflow(setup.overflow, setup.model.context)
    oracle = Oracle(setup.workload, overflow, events)
    cache = TieredCache(
        setup.sizes,
        costs,
        policy="belady",
        prefetch=setup.prefetch_mode,
        policies=lambda: BeladyPolicy(oracle),
    )
    return replay(setup.workload, overflow, events, cache, costs, oracle), cache, events
