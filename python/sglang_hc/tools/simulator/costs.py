"""Seconds of GPU work: passes over prompts, decode steps, restorations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from sglang_hc.errors import ConfigError
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan, StateShape
from sglang_hc.policy.batch import Load, shared
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import auto_plan
from sglang_hc.policy.makespan import LayerTimes
from sglang_hc.policy.meeting import restore_alone
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.restore_plan import RestorePlan, plan_restore
from sglang_hc.tools.datasheet import HostWork, Rates, modelled_costs
from sglang_hc.tools.model_shape import element_bytes
from sglang_hc.tools.simulator.models import SimulatedModel

HOST = SourceTier.HOST


@dataclass(frozen=True)
class Machine:
    """Rates per second. flops, memory_bandwidth: of one GPU. link, disk: bytes, each way.

    host_work: None for that of the server which runs the model (`SimulatedModel.host_work`).
    """

    flops: float = 185e12
    memory_bandwidth: float = 1.6e12
    link: float = 26e9
    disk: float = 5e9
    host_work: HostWork | None = None

    def costs(self, model: SimulatedModel) -> CostModel:
        """The GPUs work as one of their summed rates."""
        memory = self.memory_bandwidth * model.gpus
        rates = Rates(self.flops * model.gpus, memory, self.link, self.disk)
        work = model.host_work if self.host_work is None else self.host_work
        assert model.shape is not None
        return modelled_costs(model.name, model.shape, rates, work)


ATTENTIONSTORE_MACHINE = Machine()
"""AttentionStore section 2.4: 26 GB/s of link, disks of "less than 5 GB/s"; prefilling 2K tokens of
LLaMA-65B on four A100 takes 360 ms, which is 185 TFLOP/s a GPU. Memory bandwidth: A100, 80 % of the
data sheet (assumed); disks write as fast as they read (assumed)."""


AGAIN = "write a new one with sglang-hc profile"


@dataclass(frozen=True)
class MeasuredMachine:
    """A machine by what `sglang-hc profile` has measured there."""

    profile: CostModel
    where: str

    @property
    def state(self) -> StateShape:
        """Of the model that was measured. Raises ConfigError for a profile without passes."""
        cost = self.profile
        if cost.step is None or cost.passes is None or cost.shape is None:
            raise ConfigError(f"{self.where}: measured without passes of an engine; {AGAIN}")
        return cost.shape

    def serve(self, model: SimulatedModel) -> SimulatedModel:
        """The model with the state that was measured: with other flags its elements have another
        size. Raises ConfigError for a profile of another model, or one without passes."""
        state = self.state
        assert model.shape is not None
        size = element_bytes(state.dtype.removeprefix("torch."))
        found = state.num_layers, state.hidden_bytes // size
        wanted = model.shape.num_layers, model.shape.hidden_size
        if found != wanted:
            raise ConfigError(
                f"{self.where}: measured for a model of {found[0]} layers of {found[1]}, and this "
                f"one has {wanted[0]} of {wanted[1]}; {AGAIN}"
            )
        if model.gpus > 1:
            raise ConfigError(f"{self.where}: measured on one GPU; leave --gpus out")
        return replace(model, layout=replace(model.layout, shape=state))

    def costs(self, model: SimulatedModel) -> CostModel:
        """As measured, with passes in the place of layers, of which a server learns as much."""
        assert self.profile.passes is not None
        return replace(self.profile, prefill=self.profile.passes, head=0.0)


AnyMachine = Machine | MeasuredMachine


def with_auto_plan(
    model: SimulatedModel, machine: AnyMachine, tiers: Sequence[SourceTier]
) -> SimulatedModel:
    """The model in the layer plan that `--hc-forms auto` chooses by the costs of this machine."""
    shape = model.shape
    assert shape is not None
    chosen = auto_plan(
        machine.costs(model),
        model.layout.shape,
        tiers,
        allow_hidden=shape.allows_hidden,
        allow_recompute=shape.allows_recompute,
    )
    return replace(model, layout=replace(model.layout, plan=chosen.plan))


class Part(NamedTuple):
    """One prompt's share of a pass: so many new tokens behind `context` tokens on the device and
    those that `plan` restores first; None for none."""

    new: int
    context: int
    plan: RestorePlan | None = None

    @property
    def restored(self) -> int:
        return self.plan.tokens if self.plan is not None else 0


class SettledCosts(CostModel):
    """Costs that nothing corrects: what was asked before is remembered."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._layers: dict[tuple[int, int], float] = {}
        self._copies: dict[tuple[object, ...], float] = {}
        self._times: dict[tuple[object, ...], LayerTimes] = {}

    def prefill_layer(self, new: int, context: int) -> float:
        seconds = self._layers.get((new, context))
        if seconds is None:
            seconds = self._layers[new, context] = super().prefill_layer(new, context)
        return seconds

    def copy_stored(self, tier: SourceTier, stored: LayerPlan, tokens: int) -> float:
        key = tier, stored.hidden, stored.kv, tokens
        seconds = self._copies.get(key)
        if seconds is None:
            seconds = self._copies[key] = super().copy_stored(tier, stored, tokens)
        return seconds

    def layer_times(
        self, tier: SourceTier, tokens: int, *, context: int = 0, new: int = 0, start: float = 0.0
    ) -> LayerTimes:
        if start:
            return super().layer_times(tier, tokens, context=context, new=new, start=start)
        key = tier, tokens, context, new
        times = self._times.get(key)
        if times is None:
            times = super().layer_times(tier, tokens, context=context, new=new)
            self._times[key] = times
        return times


def settled(cost: CostModel) -> SettledCosts:
    """The same costs, and what was learned of them."""
    return SettledCosts(**{one.name: getattr(cost, one.name) for one in fields(cost)})


class GpuCosts(RestorePlanner):
    """Seconds of one model on one machine, by the cost model of `sglang-hc plan`, and the server's
    decisions by it."""

    def __init__(self, model: SimulatedModel, machine: AnyMachine = ATTENTIONSTORE_MACHINE) -> None:
        """Raises ConfigError for a profile of another model."""
        self.model = model
        self.cost = settled(machine.costs(model))
        self.plan = model.layout.plan
        self.layers = self.plan.num_layers
        super().__init__(self.cost, self.plan, True, Counter())
        self.block_copy = BLOCK_TOKENS * self.token_seconds(HOST)
        """Seconds to copy one block of many onto the device."""

    def step_seconds(self, batch: int, context: float, captures: bool = False) -> float:
        """One decode step of `batch` requests that attend to `context` tokens together."""
        assert self.cost.step is not None
        seconds = self.layers * self.cost.step.seconds(batch, context)
        return self._beside(seconds, batch * self.token_seconds(HOST)) if captures else seconds

    def attended(self, context: float) -> float:
        """Tokens of a context that a decode step reads, on the average of the layers."""
        return self.cost.prefill.attended(context)

    def pass_seconds(
        self, parts: Sequence[Part], rows: int = 0, context: float = 0.0, captures: bool = False
    ) -> float:
        """One pass over prompts. rows: requests that decode one token in it, behind `context`
        tokens together. captures: what is computed is copied to host memory beside it."""
        if len(parts) == 1 and not rows:
            seconds = self._alone(parts[0])
        else:
            seconds = self._together(parts, rows, context)
        seconds += self.cost.head
        new = sum(part.new for part in parts) + rows
        return self._beside(seconds, self._capture(new)) if captures else seconds

    def _alone(self, part: Part) -> float:
        if not part.restored:
            return self.layers * self.cost.prefill_layer(part.new, part.context)
        return self._together([part], 0, 0.0)

    def _together(self, parts: Sequence[Part], rows: int, context: float) -> float:
        """Layer by layer: the copies follow each other in the order of the layers, and a layer's
        prompts run when all of its copies are here, as in `policy.makespan`."""
        cost, host = self.cost, HOST
        lengths = [(part.new, part.context + part.restored) for part in parts]
        new = cost.prefill_batch(lengths, rows)
        if rows and cost.step is not None:
            new += context * cost.step.per_context
        busy, link = 0.0, 0.0
        loads: list[tuple[int, float, float, float]] = []
        for part in parts:
            if part.plan is None or not part.plan.tokens:
                continue
            tokens, first = part.plan.tokens, part.plan.recompute_layers
            busy += first * cost.prefill_layer(tokens, part.context)
            loads.append(
                (
                    first,
                    cost.copy_hidden(host, tokens) if self.plan.hidden else 0.0,
                    cost.project_kv(tokens) if self.plan.hidden else 0.0,
                    cost.copy_kv(host, tokens) if self.plan.kv else 0.0,
                )
            )
        if not loads:
            return busy + self.layers * new
        kv_from = self.plan.recompute + self.plan.hidden
        for layer in range(self.layers):
            copied = projected = 0.0
            for first, hidden, project, kv in loads:
                if layer >= first:
                    copied += kv if layer >= kv_from else hidden
                    projected += 0.0 if layer >= kv_from else project
            link += copied
            if cost.overlap:
                busy = max(busy, link) + projected + new
            else:
                busy += copied + projected + new
        return busy

    def _capture(self, tokens: int) -> float:
        """Seconds to copy what was computed to host memory, as fast as it comes back."""
        return self.cost.copy_stored(HOST, self.plan, tokens)

    def _beside(self, seconds: float, copies: float) -> float:
        """Seconds of work with copies beside it; on a CPU one thread does both."""
        return max(seconds, copies) if self.cost.overlap else seconds + copies

    def restored(self, tokens: int, context: int, new: int) -> RestorePlan:
        """How `tokens` are brought back behind `context` tokens, before `new` ones, alone."""
        plan = plan_restore(self.cost, self.plan, tokens, context=context, new=new)
        return self._with_copies(self.cost, plan)

    def together(self, parts: Sequence[Part]) -> list[Part]:
        """The parts of a pass, whose restorations recompute what is best for all of them."""
        plans = [(i, part, part.plan) for i, part in enumerate(parts) if part.plan is not None]
        loads = [Load(plan.tokens, part.context, plan.recompute_layers) for _, part, plan in plans]
        new = [(part.new, part.context + part.restored) for _, part, _ in plans]
        layers, found = shared(self.cost, self.plan, loads, new), list(parts)
        for (index, part, plan), count in zip(plans, layers, strict=True):
            shares = self._with_copies(self.cost, replace(plan, recompute_layers=count))
            found[index] = part._replace(plan=shares)
        return found

    def restored_early(self, blocks: int) -> float:
        """Seconds to restore blocks of a history that is on its way."""
        return restore_alone(self.cost, self.plan, blocks * BLOCK_TOKENS)

    def projected(self, blocks: int) -> float:
        """Seconds that the device works on blocks whose copies run beside its own work."""
        return self.plan.hidden * self.cost.project_kv(blocks * BLOCK_TOKENS)

    def read_seconds(self, tokens: int) -> float:
        """Disk to host memory."""
        return self.cost.copy_stored(SourceTier.DISK, self.plan, tokens)

    @property
    def tries(self) -> None:
        """Nothing is tried: what is simulated costs what this class says."""
