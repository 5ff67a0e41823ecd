"""One simulation from its settings to its numbers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import POLICIES
from sglang_hc.policy.learned import LEARNED
from sglang_hc.queue.lookahead import EVICTION_STRETCH
from sglang_hc.tools.simulator.clairvoyant import BeladyPolicy, Oracle, replay
from sglang_hc.tools.simulator.costs import ATTENTIONSTORE_MACHINE, AnyMachine, GpuCosts
from sglang_hc.tools.simulator.engine import Engine, Event, Serving
from sglang_hc.tools.simulator.jobs import Overflow
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.models import SimulatedModel
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes, admission_of
from sglang_hc.tools.workloads.sessions import Workload

SIMULATED_POLICIES = (*POLICIES, LEARNED, "fifo", "belady", "none")
AT_TURN = "at-turn"

Progress = Callable[[int], None]
OnFirst = Callable[[float], None]


@dataclass(frozen=True)
class Setup:
    """A server and its load.

    policy: one of SIMULATED_POLICIES. write: as `--hc-write`. prefetch: None for the policy's own,
    at-turn for `lru` and `fifo` (AttentionStore section 4.3.3), queue for the others. stretch:
    eviction window over the paper's. Sizes in bytes. device: for idle state. kv_tokens: of a KV
    pool that running requests and idle state share, in its place; None for room for whatever runs.
    hold: seconds for which the client of each answer pins it in host memory; None for no pins.
    """

    workload: Workload
    model: SimulatedModel
    dram: float
    disk: float
    device: float = 0.0
    policy: str = "queue"
    write: str = "all"
    prefetch: str | None = None
    machine: AnyMachine = ATTENTIONSTORE_MACHINE
    serving: Serving = field(default_factory=Serving)
    stretch: float = EVICTION_STRETCH
    kv_tokens: int | None = None
    hold: float | None = None

    @property
    def prefetch_mode(self) -> str:
        return self.prefetch or (AT_TURN if self.policy in ("lru", "fifo", "none") else "queue")

    @property
    def sizes(self) -> TierSizes:
        """Blocks per tier."""
        slot = self.model.slot_bytes
        host, disk = int(self.dram // slot), int(self.disk // slot)
        if self.kv_tokens is not None:
            return TierSizes(self.kv_tokens // BLOCK_TOKENS, host, disk, shared=True)
        return TierSizes(int(self.device // slot), host, disk)


@dataclass(frozen=True)
class Result:
    """seconds: wall clock of the simulation itself."""

    setup: Setup
    measures: Measures
    events: list[Event]
    seconds: float
    host_evictions: int
    disk_evictions: int
    disk_writes: int

    def as_json(self) -> dict[str, object]:
        """Measures, settings and the wall clock; sizes in 1e9 bytes."""
        setup = self.setup
        return {
            **self.measures.as_json(),
            "seconds": self.seconds,
            "policy": setup.policy,
            "prefetch": setup.prefetch_mode,
            "write": setup.write,
            "window_stretch": setup.stretch,
            "overflow": setup.serving.overflow,
            "batch": setup.serving.max_batch,
            "chunk": setup.serving.chunk,
            "output_cap": setup.serving.output_cap,
            "workload": setup.workload.name,
            "model": setup.model.name,
            "layer_plan": str(setup.model.layout.plan),
            "token_bytes": setup.model.token_bytes,
            "dram_gb": setup.dram / 1e9,
            "disk_gb": setup.disk / 1e9,
            "hbm_gb": setup.device / 1e9,
            "kv_tokens": setup.kv_tokens,
            "host_evictions": self.host_evictions,
            "disk_evictions": self.disk_evictions,
            "disk_written_gb": self.disk_writes * setup.model.slot_bytes / 1e9,
        }


def state_bytes(setup: Setup) -> float:
    """All state that the load ever has."""
    model, sessions = setup.model, setup.workload.sessions
    tokens = 0
    for session in sessions:
        lengths = [turn.new_tokens + turn.answer.length for turn in session.turns]
        tokens += min(max(lengths) if session.whole else sum(lengths), model.context)
    return float((tokens // BLOCK_TOKENS + len(sessions)) * model.slot_bytes)


def simulate(
    setup: Setup, progress: Progress | None = None, on_first: OnFirst | None = None
) -> Result:
    """Run it. The clairvoyant policy takes two passes over the same record of events.

    `progress` is called with the number of turns served in the pass under way; `on_first` with the
    TTFT of each turn that is counted, except by the clairvoyant policy. What they raise ends it.
    """
    start = time.perf_counter()
    collecting = gc.isenabled()
    gc.disable()  # millions of live objects, no cycles among the dead: collecting finds nothing
    try:
        if setup.policy == "belady":
            measures, cache, events = _clairvoyant(setup, progress)
        else:
            measures, cache, events = _live(setup, setup.policy, progress, on_first)
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
        cache.disk.written_blocks if cache.disk else 0,
    )


def _live(
    setup: Setup, policy: str, progress: Progress | None, on_first: OnFirst | None = None
) -> tuple[Measures, TieredCache, list[Event]]:
    costs = GpuCosts(setup.model, setup.machine)
    cache = TieredCache(
        setup.sizes,
        costs,
        policy=policy,
        prefetch=setup.prefetch_mode,
        stretch=setup.stretch,
        admission=admission_of(setup.write, setup.model.slot_bytes),
        hold=setup.hold,
    )
    engine = Engine(
        setup.workload,
        cache,
        costs,
        setup.serving,
        progress,
        on_first,
    )
    return engine.run(), cache, engine.events


def _clairvoyant(
    setup: Setup, progress: Progress | None
) -> tuple[Measures, TieredCache, list[Event]]:
    """What `queue` did, in the same order and time, with knowledge of all that follows."""
    recorded, _, events = _live(setup, "queue", progress)
    costs = GpuCosts(setup.model, setup.machine)
    overflow = Overflow(setup.serving.overflow, setup.model.context)
    oracle = Oracle(setup.workload, overflow, events)
    cache = TieredCache(
        setup.sizes,
        costs,
        policy="belady",
        prefetch=setup.prefetch_mode,
        policies=lambda: BeladyPolicy(oracle),
        admission=admission_of(setup.write, setup.model.slot_bytes),
    )
    measures = replay(setup.workload, overflow, events, cache, costs, oracle)
    measures.gpu, measures.output_tokens = recorded.gpu, recorded.output_tokens
    measures.prefill_share = recorded.prefill_share
    return measures, cache, events
