"""`sglang-hc plan --throughput`: ways to serve a model that is larger than the GPU, by batch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

from sglang_hc.policy.throughput import (
    CPU_GBPS,
    CPU_TFLOPS,
    DEFAULT_CONTEXT,
    DEFAULT_OUTPUT,
    Processor,
    Requests,
    Served,
    Ways,
)
from sglang_hc.policy.throughput_table import Comparison, compare, conclusion, table
from sglang_hc.tools.cli.main import UsageError, blaming, count, number
from sglang_hc.tools.datasheet import RESERVED, Hardware, Rates, Stored, streamed_model
from sglang_hc.tools.model_shape import ModelShape

MAX_TOKENS = 10_000_000
MAX_GB = 1_000_000.0

WEIGHT_BYTES = {"2": "16 bits", "1": "8 bits", "0.53": "4 bits with their scales"}
KV_BYTES = {"2": "16 bits", "1": "8 bits"}

OPTIONS = ("--host-gb", "--device-gb", "--weight-bytes", "--kv-bytes", "--output")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options. Numbers are checked in `run`, so that every mistake reads the same."""
    group = parser.add_argument_group("models that are larger than the GPU")
    group.add_argument(
        "--throughput",
        action="store_true",
        help="compare ways to serve the model with weights in host memory",
    )
    group.add_argument(
        "--host-gb", metavar="H", help="host memory for weights and state, 1e9 bytes"
    )
    group.add_argument("--device-gb", metavar="D", help="GPU memory to use (default: all of it)")
    group.add_argument(
        "--weight-bytes", metavar="|".join(WEIGHT_BYTES), help="bytes of a weight (default: 2)"
    )
    group.add_argument(
        "--kv-bytes", metavar="|".join(KV_BYTES), help="bytes of an element of K and V (default: 2)"
    )
    group.add_argument(
        "--output", metavar="N", help=f"tokens of an answer (default: {DEFAULT_OUTPUT})"
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that means nothing without --throughput."""
    for option in OPTIONS:
        if getattr(args, option[2:].replace("-", "_")) is not None:
            raise UsageError(f"{option}: only --throughput uses it; add that, or leave this out")


@dataclass(frozen=True)
class Setting:
    """What is planned for, checked. Memory in 1e9 bytes, link in 1e9 bytes/s."""

    shape: ModelShape
    hardware: Hardware
    link: float
    host: float
    device: float
    stored: Stored
    requests: Requests

    def ways(self) -> Ways:
        gpu = self.hardware
        rates = Rates(gpu.flops, gpu.memory_bandwidth, self.link * 1e9, None)
        with blaming("--model"):
            model = streamed_model(
                rates, self.shape, self.host * 1e9, self.device * 1e9, self.stored
            )
        per_new = 2 * self.shape.layer_params / (CPU_TFLOPS * 1e12)
        return Ways(model, self.requests, Processor(CPU_GBPS * 1e9, per_new))


def run(args: argparse.Namespace, shape: ModelShape, hardware: Hardware, link: float) -> int:
    """Print every way at its best batch. Raises UsageError for what cannot be planned."""
    setting = _read(args, shape, hardware, link)
    ways = setting.ways()
    found = compare(ways)
    if found is None:
        raise _nothing_fits(setting, ways)
    report: dict[str, Any] = {
        "model": shape.describe(),
        "gpu": hardware.name,
        "link_gbps": link,
        "host_gb": setting.host,
        "device_gb": setting.device,
        "weight_bytes": setting.stored.weight,
        "kv_bytes": setting.stored.kv,
        "context": setting.requests.context,
        "output": setting.requests.output,
        "assumed": {
            "flop_fraction": hardware.flop_fraction.value,
            "device_reserved": RESERVED,
            "cpu_gbps": CPU_GBPS,
            "cpu_tflops": CPU_TFLOPS,
        },
        "layers_gb": ways.model.layers * ways.model.weights / 1e9,
        "ways": {way: one and _way_json(ways, one) for way, one in found.served.items()},
        "fastest": found.fastest,
        "cpu": _cpu_json(*found.cpu),
        "cpu_faster_below": found.below,
    }
    print(json.dumps(report, indent=2) if args.json else _as_text(setting, report, found))
    return 0


def _read(args: argparse.Namespace, shape: ModelShape, hardware: Hardware, link: float) -> Setting:
    for option in ("--disk-gbps", "--new-tokens", "--direct"):
        if getattr(args, option[2:].replace("-", "_")):
            raise UsageError(f"{option}: --throughput does not use it; leave it out")
    if args.host_gb is None:
        raise UsageError("--throughput: give the host memory for weights and state as --host-gb")
    device = hardware.memory_gb.value
    if args.device_gb is not None:
        device = number("--device-gb", args.device_gb, 0.1, device)
    context = DEFAULT_CONTEXT if args.context is None else args.context
    output = DEFAULT_OUTPUT if args.output is None else args.output
    return Setting(
        shape,
        hardware,
        link,
        number("--host-gb", args.host_gb, 0.1, MAX_GB),
        device,
        Stored(
            _one_of("--weight-bytes", args.weight_bytes, WEIGHT_BYTES),
            _one_of("--kv-bytes", args.kv_bytes, KV_BYTES),
        ),
        Requests(
            count("--context", str(context), high=MAX_TOKENS),
            count("--output", str(output), high=MAX_TOKENS),
        ),
    )


def _one_of(option: str, text: str | None, known: dict[str, str]) -> float:
    if text is not None and text not in known:
        choices = ", ".join(f"{value} ({meaning})" for value, meaning in known.items())
        raise UsageError(f"{option} {text!r}: give one of {choices}")
    return 2.0 if text is None else float(text)


def _nothing_fits(setting: Setting, ways: Ways) -> UsageError:
    model = ways.model
    tokens = setting.requests.context + setting.requests.output / 2
    layers, state = model.layers * model.weights / 1e9, model.layers * model.kv * tokens / 1e9
    ring = model.ring(0) / 1e9
    return UsageError(
        f"--host-gb {setting.host:g}, --device-gb {setting.device:g}: not one request fits; the "
        f"layers have {layers:.1f} GB, one request {state:.1f}, and two layers on the device "
        f"{ring:.1f} of the {max(0.0, model.device) / 1e9:.1f} that are left for them; give more"
    )


def _way_json(ways: Ways, served: Served) -> dict[str, Any]:
    model, split = ways.model, served.split
    return {
        "batch": served.load.requests,
        "resident_layers": split.resident,
        "tokens": {
            "host_kv": split.host_kv,
            "host_act": split.host_act,
            "device_act": split.device_act,
            "device_kv": split.device_kv,
        },
        "rounds": served.rounds,
        "seconds_per_pass": served.seconds,
        "link_seconds": served.times.link,
        "compute_seconds": served.times.compute,
        "bound": served.times.bound,
        "tokens_per_second": served.tokens_per_second,
        "host_gb": model.host_bytes(split) / 1e9,
        "device_gb": model.device_bytes(split, served.rounds) / 1e9,
    }


def _cpu_json(batch: int, seconds: float) -> dict[str, Any] | None:
    if seconds == float("inf"):
        return None
    return {"batch": batch, "seconds_per_pass": seconds, "tokens_per_second": batch / seconds}


def _as_text(setting: Setting, report: dict[str, Any], found: Comparison) -> str:
    gpu, requests = setting.hardware, setting.requests
    lines = [
        f"model     {report['model']}",
        f"weights   {report['layers_gb']:.1f} GB in the layers, {setting.stored.weight:g} bytes "
        f"each; K and V {setting.stored.kv:g} bytes an element",
        f"gpu       {gpu.name}: {gpu.fp16_tflops.value:g} TFLOP/s ({gpu.fp16_tflops.origin}) x "
        f"{gpu.flop_fraction.value:g} ({gpu.flop_fraction.origin}), {setting.device:g} GB less "
        f"{RESERVED:.0%}",
        f"host      {setting.host:g} GB, link {setting.link:g} GB/s",
        f"requests  {requests.context} prompt tokens, {requests.output} of the answer; as many as "
        "end begin",
        "",
        *table(found),
        "",
        *conclusion(found),
        "modelled: nothing here was measured",
    ]
    return "\n".join(lines)
