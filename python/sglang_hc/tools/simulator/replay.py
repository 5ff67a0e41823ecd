"""What a server recorded (`--hc-trace`), served again by the simulator.

A busy period is a time in which the server always has a request. Each one begins with an idle
server in the simulation too, after the same pause, so that errors do not add up where clients wait
for the server. Within it requests come at their times, and later turns wait for the answer before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, BlockLayout, LayerPlan
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.profile_file import ANY_SERVER
from sglang_hc.tiers.trace import Served
from sglang_hc.tools.simulator.costs import AGAIN, GpuCosts, MeasuredMachine
from sglang_hc.tools.simulator.engine import Engine, Serving
from sglang_hc.tools.simulator.measures import Measures
from sglang_hc.tools.simulator.models import SERVER_HOST_WORK, SimulatedModel
from sglang_hc.tools.simulator.tiers import TieredCache, TierSizes, admission_of
from sglang_hc.tools.workloads.recorded import Request, linked, session_of
from sglang_hc.tools.workloads.sessions import Ids, Session, Workload
from sglang_hc.tree.identity import TOKEN_BYTES

LAST_TOKEN = bytes(TOKEN_BYTES)
"""Of an answer a record has what was computed: all but the last token, which takes a step too."""


class Times(NamedTuple):
    """Of one request, in seconds: until its first token."""

    request: Request
    simulated: float

    @property
    def measured(self) -> float:
        assert self.request.first is not None
        return self.request.first - self.request.arrived


class Replayed(NamedTuple):
    """times: of each request. busy: seconds of all busy periods, simulated and measured."""

    times: list[Times]
    simulated_busy: float
    measured_busy: float


class _Period(NamedTuple):
    """pause: seconds before it. begin: when, in the record. talks: requests of its conversations.
    seconds: as measured."""

    pause: float
    begin: float
    talks: list[list[Request]]
    seconds: float


@dataclass
class _Replay(Engine):
    """One server working through busy periods. busy: seconds of all of them."""

    periods: Sequence[_Period] = ()
    busy: float = field(default=0.0, init=False)

    def run(self) -> Measures:
        first = 0
        for period in self.periods:
            begin = self.now + period.pause
            for talk in self._talks[first : first + len(period.talks)]:
                self._schedule(begin + talk.session.arrival, talk.index)
            first += len(period.talks)
            self._serve()
            self.busy += self.now - begin
        return self.measures


def replay(requests: Sequence[Request], served: Served, machine: MeasuredMachine) -> Replayed:
    """Serve answered requests, by their arrival, as a server did. Raises ConfigError where the
    server or its machine is not what the profile says, or not simulated."""
    model = _model(served, machine)
    costs = GpuCosts(model, machine)
    sizes = TierSizes(
        served.kv_tokens // BLOCK_TOKENS, served.host_slots, served.disk_slots, shared=True
    )
    cache = TieredCache(
        sizes,
        costs,
        policy=served.eviction,
        prefetch=served.prefetch,
        admission=admission_of(served.write, model.slot_bytes),
    )
    periods = list(_busy(requests))
    sessions = [_session(talk, period.begin) for period in periods for talk in period.talks]
    serving = Serving(
        max_batch=served.running,
        chunk=served.chunk,
        mixed=served.mixed,
        ready_first=served.schedule == "ready-first",
        late=served.overlap and not costs.cost.overlap,
    )
    load = Workload("record", tuple(sessions))
    engine = _Replay(load, cache, costs, serving, periods=periods)
    engine.run()
    talks = [talk for period in periods for talk in period.talks]
    measured = sum(period.seconds for period in periods)
    return Replayed(_times(engine, talks), engine.busy, measured)


def _model(served: Served, machine: MeasuredMachine) -> SimulatedModel:
    """What is served. Raises ConfigError."""
    cost, state, where = machine.profile, machine.state, machine.where
    known = cost.fingerprint.split(", ")
    foreign = [part for part in served.model.split(", ") if part not in known]
    if foreign and cost.fingerprint != ANY_SERVER:
        raise ConfigError(
            f"{where}: measured for {cost.fingerprint!r}, and the record is of a server with "
            f"{', '.join(foreign)}; measure there, with the flags and threads of the server"
        )
    for option, is_there in (
        ("--hc-restore always", served.restore != "cost"),
        ("--hc-remote", served.remote),
    ):
        if is_there:
            raise ConfigError(
                f"the server ran with {option}, which is not simulated; record one without it"
            )
    if served.disk_slots and SourceTier.DISK not in cost.copies:
        raise ConfigError(f"{where}: has no costs for disk; {AGAIN} --hc-disk DIR")
    plan = LayerPlan.parse(served.layer_plan or "kv", state.num_layers)
    if plan.hidden and cost.project is None:
        raise ConfigError(f"{where}: has no costs for hidden states; {AGAIN}")
    layout = BlockLayout(plan, state)
    if served.slot_bytes and layout.slot_bytes != served.slot_bytes:
        raise ConfigError(
            f"{where}: its model keeps {layout.slot_bytes} bytes of a block, and the server of the "
            f"record {served.slot_bytes}; {AGAIN}, with the flags of the server"
        )
    context = min(served.context, served.kv_tokens - BLOCK_TOKENS)
    return SimulatedModel("record", None, layout, context, 1, SERVER_HOST_WORK)


def _busy(requests: Sequence[Request]) -> list[_Period]:
    """Busy periods of requests by their arrival."""
    periods: list[list[Request]] = []
    ended = 0.0
    for request in requests:
        if not periods or request.arrived >= ended:
            periods.append([])
        periods[-1].append(request)
        ended = max(ended, request.ended)
    found, ended = [], requests[0].arrived if requests else 0.0
    for period in periods:
        begin, end = period[0].arrived, max(request.ended for request in period)
        found.append(_Period(begin - ended, begin, linked(period), end - begin))
        ended = end
    return found


def _session(talk: Sequence[Request], begin: float) -> Session:
    """The requests of a talk in a busy period that began at `begin`."""
    session = session_of(talk).moved(begin)
    turns = tuple(
        replace(turn, answer=Ids(request.answer + LAST_TOKEN))
        for turn, request in zip(session.turns, talk, strict=True)
    )
    return replace(session, turns=turns)


def _times(engine: Engine, talks: Sequence[Sequence[Request]]) -> list[Times]:
    """What the engine's events say of each request."""
    arrived: dict[int, float] = {}
    served = [0] * len(talks)
    times = []
    for event in engine.events:
        if event.kind == "arrive":
            arrived[event.session] = event.time
        elif event.kind == "first":
            request = talks[event.session][served[event.session]]
            served[event.session] += 1
            times.append(Times(request, event.time - arrived[event.session]))
    return times
