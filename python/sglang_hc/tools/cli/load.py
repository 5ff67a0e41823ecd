"""Options that describe a load and a machine, shared by `simulate` and `capacity`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_hc.tools.cli.main import UsageError, blaming, count, number
from sglang_hc.tools.simulator.jobs import OVERFLOW_MODES
from sglang_hc.tools.simulator.models import (
    ATTENTIONSTORE_MACHINE,
    MODEL_NAMES,
    Machine,
    SimulatedModel,
    load_model,
)
from sglang_hc.tools.simulator.workloads import attentionstore, l_eval, sharegpt4
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.sessions import Workload

GENERATORS: dict[str, Callable[..., Workload]] = {
    "attentionstore": attentionstore,
    "sharegpt4": sharegpt4,
    "l-eval": l_eval,
}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options of the load, the model and the machine. Checked when they are used."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--workload",
        required=True,
        metavar="NAME|FILE",
        help=f"{', '.join(GENERATORS)}, or a trace: of a server's --hc-trace, Mooncake or "
        "Bailian JSONL, BurstGPT CSV, ShareGPT JSON",
    )
    load.add_argument("--seed", type=int, default=0, help="seed of a generated load (default: 0)")
    load.add_argument("--sessions", metavar="N", help="number of sessions of a generated load")
    load.add_argument(
        "--rate", metavar="X", help="new sessions per second, unless the trace has times"
    )
    load.add_argument("--think", metavar="S", help="seconds between answer and next turn")
    load.add_argument(
        "--alpha", metavar="A", help="Zipf skewness of l-eval's contexts (default: 1)"
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        metavar="NAME|CONFIG",
        help=f"{', '.join(MODEL_NAMES)}, or a config.json or the folder of one",
    )
    model.add_argument(
        "--forms", default="kv", metavar="PLAN", help="kv, hidden, or e.g. hidden:20,kv:20"
    )
    model.add_argument("--gpus", metavar="N", help="GPUs that serve the model together")
    model.add_argument("--context", metavar="N", help="context window in tokens")
    model.add_argument(
        "--overflow",
        choices=OVERFLOW_MODES,
        default="off",
        help="conversations longer than the window, as by the server's --hc-overflow "
        "(default: off: the client drops its oldest tokens)",
    )
    model.add_argument("--batch", metavar="N", default="24", help="largest batch (default: 24)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--hbm-gb", metavar="X", default="0", help="device memory for idle state")
    base = ATTENTIONSTORE_MACHINE
    for name, value, text in (
        ("--link-gbps", base.link, "host to device, 1e9 bytes/s"),
        ("--disk-gbps", base.disk, "all disks together, 1e9 bytes/s"),
    ):
        machine.add_argument(
            name, metavar="X", default=f"{value / 1e9:g}", help=f"{text} (default: %(default)s)"
        )
    machine.add_argument(
        "--gpu-tflops",
        metavar="X",
        default=f"{base.flops / 1e12:g}",
        help="sustained, of one GPU (default: %(default)s, AttentionStore's A100)",
    )


def read_workload(args: argparse.Namespace) -> Workload:
    """The load that the options describe. Raises UsageError."""
    sessions = None if args.sessions is None else count("--sessions", args.sessions)
    rate = None if args.rate is None else number("--rate", args.rate, low=1e-9)
    think = None if args.think is None else number("--think", args.think)
    alpha = None if args.alpha is None else number("--alpha", args.alpha)
    if alpha is not None and args.workload != "l-eval":
        raise UsageError("--alpha: only l-eval draws contexts by Zipf; leave it out")
    if think is not None and args.workload == "l-eval":
        raise UsageError("--think: l-eval has one turn per session; leave it out")
    if args.workload in GENERATORS:
        given = {"sessions": sessions, "rate": rate, "think": think, "alpha": alpha}
        options = {name: value for name, value in given.items() if value is not None}
        return GENERATORS[args.workload](args.seed, **options)
    path = Path(args.workload)
    if not path.is_file():
        raise UsageError(
            f"--workload {args.workload!r}: neither {', '.join(GENERATORS)} nor a file"
        )
    if sessions is not None:
        raise UsageError("--sessions: a trace file has its own; leave it out")
    with blaming("--workload"):
        return read_trace(path, Timing(rate, think or 0.0, args.seed))


def read_model(args: argparse.Namespace) -> SimulatedModel:
    """The model and its layer plan. Raises UsageError."""
    gpus = None if args.gpus is None else count("--gpus", args.gpus)
    context = None if args.context is None else count("--context", args.context, low=128)
    with blaming("--model, --forms"):
        return load_model(args.model, args.forms, gpus, context)


def read_machine(args: argparse.Namespace) -> Machine:
    return Machine(
        flops=number("--gpu-tflops", args.gpu_tflops, low=1e-6) * 1e12,
        link=number("--link-gbps", args.link_gbps, low=1e-6) * 1e9,
        disk=number("--disk-gbps", args.disk_gbps, low=1e-6) * 1e9,
    )


@contextmanager
def turns_bar(total: int, text: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, fed with the number of turns served."""
    from tqdm import tqdm

    with tqdm(total=total, desc=text, unit="turn", disable=quiet, mininterval=0.5) as bar:

        def show(served: int) -> None:
            if served < bar.n:
                bar.reset()
            bar.update(served - bar.n)

        yield show
