"""`sglang-hc plan`: which layers to keep in which form, for hardware that need not be there."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_hc.errors import ConfigError
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.cost_model import CostModel, SourceTier
from sglang_hc.policy.layer_plan import plan_for, stored_bytes
from sglang_hc.policy.makespan import LayerTimes, makespan
from sglang_hc.policy.meeting import Split, best_split, from_below
from sglang_hc.policy.restore_plan import RestorePlan, plan_restore
from sglang_hc.policy.served import REFUSED
from sglang_hc.policy.throughput import DEFAULT_CONTEXT as PROMPT
from sglang_hc.tools.cli import plan_ends, throughput
from sglang_hc.tools.cli.main import UsageError, blaming, count, number
from sglang_hc.tools.datasheet import Hardware, datasheet_costs, load_hardware
from sglang_hc.tools.model_config import architecture_of, read_model_config
from sglang_hc.tools.model_ends import computed_shape, kept_shape
from sglang_hc.tools.model_shape import ModelShape

DEFAULT_CONTEXT = 2560
DEFAULT_NEW = 64
LEAST_GBPS, MAX_GBPS = 1e-6, 10_000.0
MAX_TOKENS = 100_000_000
BALANCED = 0.03
"""The two resources are called balanced when their work differs by less than this share."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH_OR_CONFIG",
        help="folder with a config.json, or the config.json itself; no weights are needed",
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="NAME|FILE",
        help="shipped data-sheet profile (an unknown name lists them) or a profile file",
    )
    parser.add_argument(
        "--link-gbps",
        metavar="X",
        help="host memory to GPU, 1e9 bytes/s (default: the GPU profile's link)",
    )
    parser.add_argument(
        "--disk-gbps",
        metavar="Y",
        help="all disks together, 1e9 bytes/s; without it there is no plan for disk",
    )
    parser.add_argument(
        "--direct",
        action="store_true",
        help="from disk straight to the GPU, layer by layer as in HCache; a server reads into host "
        "memory and computes meanwhile",
    )
    parser.add_argument(
        "--context",
        metavar="N",
        help=f"history tokens to restore (default: {DEFAULT_CONTEXT}, half of the conversations in "
        "HCache figure 3b are longer); with --throughput, tokens of a prompt (default: "
        f"{PROMPT})",
    )
    parser.add_argument(
        "--new-tokens",
        metavar="N",
        help=f"tokens of the new prompt, for the TTFT; 0 plans for the restoration alone (default: "
        f"{DEFAULT_NEW})",
    )
    throughput.configure(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, times in seconds")


def run(args: argparse.Namespace) -> int:
    """Print the plans. Raises UsageError for anything that cannot be planned."""
    with blaming("--model"):
        config, where = read_model_config(args.model)
        _refuse(config, where)
        kept = None if args.throughput else kept_shape(config, where)
        shape = ModelShape.from_config(config, where=where) if kept is None else None
    with blaming("--gpu"):
        hardware = load_hardware(args.gpu)
    link = hardware.link_gbps.value
    if args.link_gbps is not None:
        link = _gbps("--link-gbps", args.link_gbps)
    if args.throughput:
        assert shape is not None
        return throughput.run(args, shape, hardware, link)
    throughput.refuse_options(args)
    disk = None if args.disk_gbps is None else _gbps("--disk-gbps", args.disk_gbps)
    context, new = (
        default if given is None else count(option, given, low, MAX_TOKENS)
        for option, given, default, low in (
            ("--context", args.context, DEFAULT_CONTEXT, 1),
            ("--new-tokens", args.new_tokens, DEFAULT_NEW, 0),
        )
    )
    if shape is None:
        assert kept is not None
        rates = {"host": link} | ({} if disk is None else {"disk": disk})
        computed = computed_shape(config, where)
        modelled = None if computed is None else datasheet_costs(hardware, computed, link * 1e9)
        print(plan_ends.report(kept, context, rates, modelled, as_json=args.json))
        return 0
    staged = None if disk is None or args.direct else disk * 1e9
    cost = datasheet_costs(hardware, shape, link * 1e9, staged)
    reports = {tier: report_of(cost, shape, tier, context, new) for tier in cost.copies}
    if args.direct:
        if disk is None:
            raise UsageError("--direct: give the rate of the disks as --disk-gbps")
        # What a GPU reads by itself is to it like host memory behind a slower link.
        straight = datasheet_costs(hardware, shape, min(link, disk) * 1e9)
        reports[SourceTier.DISK] = report_of(straight, shape, SourceTier.HOST, context, new)
    setting = {
        "model": shape.describe(),
        "gpu": hardware.name,
        "link_gbps": link,
        "disk_gbps": disk,
        "direct": args.direct,
        "context": context,
        "new_tokens": new,
        "only_kv": _only_kv(shape),
    }
    if args.json:
        print(json.dumps(_as_json(setting, hardware, reports), indent=2))
    else:
        print(_as_text(setting, hardware, reports))
    return 0


def _refuse(config: dict[str, Any], where: str) -> None:
    """Raise ConfigError for a model that no server with the tiers takes."""
    name = architecture_of(config)
    if name in REFUSED:
        raise ConfigError(
            f"{where}: {name} is refused by a server with the tiers, as docs/models.md says; only "
            "models that are served can be planned"
        )


def _only_kv(shape: ModelShape) -> str | None:
    """Why no layer of a model is kept otherwise; None where another form is possible."""
    if shape.allows_hidden or shape.allows_recompute:
        return None
    if shape.is_latent:
        return "hidden states are larger than the latent, and no first layers of it are recomputed"
    return f"{shape.architecture} is none of the models of which other forms were checked"


@dataclass(frozen=True)
class Way:
    """One way to restore: its plan, seconds to restore, seconds to the first token, bytes kept.
    planned: what the planner of a server does with it; None where the TTFT says so already."""

    plan: LayerPlan
    restore: float
    ttft: float
    bytes_per_token: int
    planned: RestorePlan | None = None

    @property
    def more_recomputed(self) -> int:
        """Layers that are stored and that the planner recomputes all the same."""
        if self.planned is None:
            return 0
        layers = self.planned.recompute_layers if self.planned.tokens else self.plan.num_layers
        return layers - self.plan.recompute


@dataclass(frozen=True)
class Report:
    """Everything said about one tier. `ways["plan"]` is the choice, the others the single forms.
    split: how the choice meets a history below host memory; None where nothing is read from there.
    copy_busy, compute_busy: seconds that the link and the GPU work to restore it; with a split,
    that the disk reads and that the GPU with its link works up to the first token."""

    ways: dict[str, Way]
    copy_busy: float
    compute_busy: float
    balance_gbps: float
    split: Split | None

    @property
    def bottleneck(self) -> str:
        longer = max(self.copy_busy, self.compute_busy)
        if abs(self.copy_busy - self.compute_busy) <= BALANCED * longer:
            return "balanced"
        return "copy" if self.copy_busy > self.compute_busy else "compute"


def report_of(
    cost: CostModel, shape: ModelShape, tier: SourceTier, context: int, new: int
) -> Report:
    """How a history of `context` tokens comes back from `tier`, and `new` tokens behind it run.
    Raises KeyError for a tier that `cost` does not know."""
    state = shape.state_shape()
    layers = state.num_layers
    alone = cost.layer_times(tier, context)
    then_new = cost.layer_times(tier, context, new=new)
    recompute = shape.allows_recompute
    chosen = plan_for(
        cost, state, [(tier, context)], new=new, allow_hidden=shape.allows_hidden,
        allow_recompute=recompute,
    )  # fmt: skip

    def meeting(plan: LayerPlan, behind: int) -> Split:
        return best_split(cost, plan, from_below(tier, context, behind))

    def way(plan: LayerPlan) -> Way:
        restore, ttft, planned = makespan(alone, plan), makespan(then_new, plan), None
        if plan.recompute == layers:  # history and new tokens are then one prefill
            ttft = layers * cost.prefill_layer(context + new, 0)
        elif tier is not SourceTier.HOST:
            restore, ttft = meeting(plan, 0).seconds, meeting(plan, new).seconds
        else:
            planned = plan_restore(
                cost, plan, context, context=0, new=new, allow_recompute=recompute
            )
        return Way(plan, restore, ttft, stored_bytes(plan, state), planned)

    copy_busy, compute_busy = busy(alone, chosen)
    split = None
    if tier is not SourceTier.HOST and chosen.recompute < layers:
        split = meeting(chosen, new)
        head, rest = split.head, context - split.head
        copy_busy = cost.copy_stored(tier, chosen, rest)
        restored = cost.layer_times(SourceTier.HOST, rest, context=head, new=new)
        compute_busy = layers * cost.prefill_layer(head, 0) + makespan(restored, chosen)
    return Report(
        ways={
            "plan": way(chosen),
            "recompute": way(LayerPlan(layers, 0, 0)),
            "kv": way(LayerPlan(0, 0, layers)),
            "hidden": way(LayerPlan(0, layers, 0)),
        },
        copy_busy=copy_busy,
        compute_busy=compute_busy,
        balance_gbps=_balance(alone, state.hidden_bytes * context),
        split=split,
    )


def busy(times: LayerTimes, plan: LayerPlan) -> tuple[float, float]:
    """Seconds that (copy, compute) work for this plan, the new tokens included."""
    copy = plan.kv * times.copy_kv
    compute = plan.recompute * times.recompute + plan.num_layers * times.new
    if plan.hidden:
        copy += plan.hidden * times.copy_hidden
        compute += plan.hidden * times.project
    return copy, compute


def _balance(times: LayerTimes, hidden_bytes: int) -> float:
    """Bandwidth, 1e9 bytes/s, at which a layer's hidden states arrive as fast as they project."""
    return hidden_bytes / times.project / 1e9


def _as_json(
    setting: dict[str, Any], hardware: Hardware, reports: dict[SourceTier, Report]
) -> dict[str, Any]:
    """The JSON object: the host tier's answer at the top level, every tier under "tiers"."""
    tiers = {tier.value: _tier_json(report) for tier, report in reports.items()}
    return {
        **setting,
        "gpu_profile": {
            name: value
            for name, value in msgspec.to_builtins(hardware).items()
            if isinstance(value, dict)
        },
        **tiers[SourceTier.HOST.value],
        "tiers": tiers,
    }


def _tier_json(report: Report) -> dict[str, Any]:
    plan = report.ways["plan"].plan
    return {
        "layer_plan": {"recompute": plan.recompute, "hidden": plan.hidden, "kv": plan.kv},
        "restore_seconds": {name: way.restore for name, way in report.ways.items()},
        "ttft_seconds": {name: way.ttft for name, way in report.ways.items()},
        "bytes_per_token": {name: way.bytes_per_token for name, way in report.ways.items()},
        "planner": {
            name: {"more_recomputed": way.more_recomputed, "ttft_seconds": way.planned.seconds}
            for name, way in report.ways.items()
            if way.planned is not None
        },
        "bottleneck": report.bottleneck,
        "copy_busy_seconds": report.copy_busy,
        "compute_busy_seconds": report.compute_busy,
        "hidden_balance_gbps": report.balance_gbps,
        "computed_while_read_tokens": 0 if report.split is None else report.split.head,
    }


def _as_text(setting: dict[str, Any], hardware: Hardware, reports: dict[SourceTier, Report]) -> str:
    rate, fraction = hardware.fp16_tflops, hardware.flop_fraction
    disk = setting["disk_gbps"]
    lines = [
        f"model    {setting['model']}",
        f"gpu      {hardware.name}: {rate.value:g} TFLOP/s ({rate.origin}) x {fraction.value:g} "
        f"({fraction.origin}), {hardware.memory_gbps.value:g} GB/s memory "
        f"({hardware.memory_gbps.origin})",
        f"sources  host {setting['link_gbps']:g} GB/s" + (f", disk {disk:g} GB/s" if disk else ""),
        f"request  {setting['context']} history tokens, {setting['new_tokens']} new",
    ]
    if setting["only_kv"] is not None:
        lines.append(f"forms    KV only: {setting['only_kv']}")
    for tier, report in reports.items():
        straight = setting["direct"] and tier is SourceTier.DISK
        source = f"{tier.value} straight to the GPU" if straight else tier.value
        lines += ["", *_tier_text(source, report)]
    return "\n".join(lines)


def _tier_text(source: str, report: Report) -> list[str]:
    chosen = report.ways["plan"]
    names = {"plan": str(chosen.plan), "hidden": "hidden only", "kv": "KV only"}
    names["recompute"] = "recompute"
    width = max(map(len, names.values()))
    lines = [
        f"from {source}: {chosen.plan}",
        f"  {'':{width}}  {'restore':>10}  {'vs plan':>7}  {'TTFT':>10}  {'bytes/token':>11}",
    ]
    for key, name in names.items():
        way = report.ways[key]
        ratio = f"{way.restore / chosen.restore:.2f}x" if way is not chosen else ""
        lines.append(
            f"  {name:{width}}  {_seconds(way.restore):>10}  {ratio:>7}  {_seconds(way.ttft):>10}  "
            f"{way.bytes_per_token:>11,}"
        )
    for key, name in names.items():
        way = report.ways[key]
        if way.planned is not None and way.more_recomputed:
            lines.append(
                f"  {name}: for this request the planner recomputes {way.more_recomputed} layers "
                f"more, TTFT {_seconds(way.planned.seconds)}"
            )
    copy, compute = "copy", "compute"
    if report.split is not None:
        copy, compute = "disk", "GPU"
        lines.append(f"  {_met(report.split)}")
    slowest = {"copy": copy, "compute": compute}.get(report.bottleneck, report.bottleneck)
    return [
        *lines,
        f"  bottleneck: {slowest} ({copy} works {_seconds(report.copy_busy)}, {compute} "
        f"{_seconds(report.compute_busy)})",
        f"  hidden states alone would balance at {report.balance_gbps:.1f} GB/s",
    ]


def _met(split: Split) -> str:
    """How a history below host memory comes back, in words."""
    if split.head:
        return f"the first {split.head} tokens are computed while the others are read"
    return "all tokens are read"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} us"


def _gbps(option: str, text: str) -> float:
    return number(option, text, LEAST_GBPS, MAX_GBPS)
