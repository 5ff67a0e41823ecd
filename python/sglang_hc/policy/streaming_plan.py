"""How state of running requests is kept, by the best pass that is modelled (HybridServe 4.3).

The paper's Algorithm 1 divides host memory; a server here takes the exact optimum (`hybrid`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_hc.errors import ConfigError
from sglang_hc.memory import GIB
from sglang_hc.policy.rounds import surplus
from sglang_hc.policy.streamed_pass import PLACES, StreamedModel
from sglang_hc.policy.streaming import UNMEASURED, Streaming, ThroughputSpec
from sglang_hc.policy.throughput import ACT_SHARES, ROUNDS, Processor, Requests, Served, Ways
from sglang_hc.policy.throughput_table import SAME, Comparison, compare, conclusion, table

AUTO = ThroughputSpec()
"""Nothing is forced."""


@dataclass(frozen=True)
class Setting:
    """What a server streams on.

    served: the model as it lies: `weights` are those that cross, on average over its layers, and
    `device` is what is left for state, with the places of the weights. whole: the same before
    anybody chose what crosses, for other ways to serve. requests: that are expected. cpu: that
    could compute the rest. longest: tokens of a request at most. tokens: slots that the user asks
    for; None for as many as host memory holds. running: requests at most that the user lets run;
    None for any number. is_apart: the device has memory of its own; else nothing is gained by
    hidden states that stay there. no_hidden: why nothing may be kept as hidden states; None when it
    may.
    """

    served: StreamedModel
    whole: StreamedModel
    requests: Requests
    cpu: Processor
    longest: int
    tokens: int | None
    running: int | None
    is_apart: bool
    no_hidden: str | None

    def most_on_device(self, spec: ThroughputSpec = AUTO) -> float:
        """Hidden states that may stay on the device, in tokens, as far as there is room."""
        if spec.device_act_gb is not None:
            return int(spec.device_act_gb * GIB / (self.served.layers * self.served.act))
        return math.inf if self.is_apart else 0

    def streams(self, spec: ThroughputSpec) -> Ways:
        """State crosses, and weights lie where they lie."""
        most = [] if self.running is None else [self.running]
        if self.tokens is not None:
            most.append(max(1, self.tokens // sum(self.requests)))
        on_device = self.most_on_device(spec)
        return Ways(self.served, self.requests, self.cpu, 0, min(most, default=None), on_device)

    @property
    def all_ways(self) -> Ways:
        return Ways(
            self.whole,
            self.requests,
            self.cpu,
            most=self.running,
            most_on_device=self.most_on_device(),
        )


@dataclass(frozen=True)
class StreamingPlan:
    """streaming: what is settled. model: by what passes are modelled. served: the best of them."""

    streaming: Streaming
    model: StreamedModel
    served: Served


def settle(setting: Setting, spec: ThroughputSpec) -> StreamingPlan:
    """What a specification forces, and for the rest what is fastest. Raises ConfigError for what
    cannot be, or does not fit."""
    _check_hidden(setting, spec)
    model = setting.served
    rounds = ROUNDS if spec.rounds is None else (spec.rounds,)
    served = setting.streams(spec).best_stream(spec.act, rounds)
    if served is None:
        raise _nothing_fits(setting)
    share = served.split.act / served.split.tokens
    most = setting.most_on_device(spec)
    kept = int(served.split.device_act if math.isinf(most) else most)
    if kept and not share:
        raise ConfigError(
            f"--hc-throughput device-act-gb:{spec.device_act_gb:g}: nothing is kept as hidden "
            "states here; give act:SHARE above 0 too, or leave it out"
        )
    slots = _slots(setting, spec, served, share, kept)
    slots = _slots(setting, spec, served, share, _beside_places(model, spec, slots))
    balance = UNMEASURED
    if math.isfinite(model.kv_gen):
        balance = surplus(model, served.load, served.split)
    return StreamingPlan(replace(slots, balance=balance), model, served)


def refuse_slower(setting: Setting, plan: StreamingPlan, found: Comparison) -> None:
    """Raise ConfigError where the model is served as fast with state on the device."""
    other = found.served["ahead"]
    streams = plan.served.tokens_per_second
    if other is None or other.tokens_per_second < SAME * streams:
        return
    rates = f"modelled at {other.tokens_per_second:.3g} tokens/s, streaming at {streams:.3g}"
    whole, alone = setting.whole, found.served["sglang"]
    if (
        alone is not None
        and alone.split.resident == whole.layers
        and alone.tokens_per_second >= SAME * other.tokens_per_second
    ):
        weights = whole.layers * whole.weights / GIB
        raise ConfigError(
            f"--hc-throughput auto: the weights fit ({weights:.1f} of {whole.device / GIB:.1f} GiB)"
            f"; SGLang alone is {rates}; leave the flag out"
        )
    better = _better_offload(setting, plan, found)
    remedy = "leave the flag out" if better is None else f"{better}: give that"
    raise ConfigError(
        "--hc-throughput auto: weights that are copied ahead of their layer, with state on the "
        f"device (--hc-offload-gb alone), are {rates}; {remedy}"
    )


def _better_offload(setting: Setting, plan: StreamingPlan, found: Comparison) -> str | None:
    """With how much of the weights in host memory streaming is fastest of all; None where it is
    not, or as they lie."""
    streams = [served for way in ACT_SHARES if (served := found.served.get(way)) is not None]
    best = max(streams, key=lambda served: served.tokens_per_second, default=None)
    others = [plan.served, found.served["ahead"]]
    fastest = max(one.tokens_per_second for one in others if one is not None)
    if best is None or SAME * best.tokens_per_second <= fastest:
        return None
    whole = setting.whole
    crossing = (whole.layers - best.split.resident) * whole.weights / GIB
    return (
        f"with --hc-offload-gb {crossing:.4g} streaming is modelled at "
        f"{best.tokens_per_second:.3g} tokens/s"
    )


def comparison(setting: Setting) -> Comparison | None:
    """Every way to serve the model here."""
    return compare(setting.all_ways)


def lines(setting: Setting, plan: StreamingPlan, found: Comparison | None) -> list[str]:
    """For a log: the ways side by side, and what else could be done."""
    requests, model = setting.requests, setting.whole
    said = [
        f"modelled by the costs of this machine, {requests.context} prompt tokens and "
        f"{requests.output} of the answer:"
    ]
    if found is None:
        return [*said, "no way fits"]
    said += [*table(found), *conclusion(found)]
    better = _better_offload(setting, plan, found)
    if better is not None:
        said.append(better)
    if model.active < 1:
        said.append(
            "experts could be computed on the CPU (SGLang's --kt-weight-path), in place of "
            "--hc-offload-gb"
        )
    return said


def _check_hidden(setting: Setting, spec: ThroughputSpec) -> None:
    """Raise ConfigError where hidden states are forced that cannot be."""
    if not spec.act:
        return
    model, asked = setting.served, f"--hc-throughput act:{spec.act:g}"
    if setting.no_hidden is not None:
        raise ConfigError(f"{asked}: {setting.no_hidden}; use act:0")
    if model.act > model.kv:
        raise ConfigError(
            f"{asked}: hidden states ({model.act:,.0f} bytes a layer) are larger than KV "
            f"({model.kv:,.0f}); use act:0"
        )


def _nothing_fits(setting: Setting) -> ConfigError:
    model = setting.served
    tokens = setting.requests.context + setting.requests.output / 2
    weights, state = model.layers * model.weights, model.layers * model.kv * tokens
    places = model.places(tokens, 1)
    if places <= model.device - model.ring(0):
        return ConfigError(
            f"--hc-throughput needs {weights / GIB:.3g} GiB of host memory for weights and "
            f"{state / GIB:.3g} for one request; {model.host / GIB:.3g} are free; free some, lower "
            "--hc-offload-gb, or leave the flag out"
        )
    return ConfigError(
        f"--hc-throughput: two places for one request take {places / GIB:.3g} GiB of the device; "
        f"{(model.device - model.ring(0)) / GIB:.3g} are left; raise --mem-fraction-static or "
        "--hc-offload-gb"
    )


def _slots(
    setting: Setting, spec: ThroughputSpec, served: Served, share: float, kept: int
) -> Streaming:
    """share: of hidden states, of which `kept` are on the device as far as there are so many."""
    tokens = setting.tokens or _capacity(setting.served, share, kept)
    if tokens < 1:
        raise _nothing_fits(setting)
    act_tokens = round(share * tokens)
    of_round = served.load.tokens / served.rounds
    if spec.rounds is not None:
        of_round = tokens / spec.rounds
    rows = max(math.ceil(of_round), min(setting.longest, tokens))
    return Streaming(tokens, act_tokens, min(kept, act_tokens), rows)


def _capacity(model: StreamedModel, share: float, kept: int) -> int:
    """Slots whose rows fill host memory."""
    room = model.host / model.layers - model.weights
    mixed = (1 - share) * model.kv + share * model.act
    tokens = (room + model.act * kept) / mixed
    if share * tokens < kept:  # all hidden states are on the device
        tokens = room / ((1 - share) * model.kv) if share < 1 else float(kept)
    return int(tokens)


def _beside_places(model: StreamedModel, spec: ThroughputSpec, slots: Streaming) -> int:
    """Hidden states that stay on the device: as many as these slots have, or as there is room for
    unless the user says how many. Raises ConfigError when the places do not fit."""
    rows, kept = slots.rows, slots.device_act
    room = model.device - model.ring(0)
    each = model.kv * rows + model.act * min(rows, slots.act_tokens)
    left = room - PLACES * each
    most = max(0, int(left / (model.layers * model.act)))
    wanted = kept if spec.device_act_gb is not None else min(kept, most)
    if left < 0 or wanted > most:
        stay = model.layers * model.act * wanted / GIB
        raise ConfigError(
            f"--hc-throughput: two places of {rows} tokens take {PLACES * each / GIB:.3g} GiB of "
            f"the device, and hidden states that stay {stay:.3g}; {room / GIB:.3g} are left; give "
            "more rounds, a smaller device-act-gb or --context-length, or raise "
            "--mem-fraction-static"
        )
    return wanted
