"""Options that describe a load and a machine, shared by `simulate` and `capacity`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.profile_file import read_profile
from sglang_hc.tools.cli.main import UsageError, blaming, count, number
from sglang_hc.tools.datasheet import load_hardware
from sglang_hc.tools.simulator.costs import (
    ATTENTIONSTORE_MACHINE,
    AnyMachine,
    MeasuredMachine,
    with_auto_plan,
)
from sglang_hc.tools.simulator.engine import Serving
from sglang_hc.tools.simulator.jobs import OVERFLOW_MODES
from sglang_hc.tools.simulator.models import (
    MODEL_NAMES,
    SERVER_HOST_WORK,
    SimulatedModel,
    load_model,
)
from sglang_hc.tools.simulator.run import Setup
from sglang_hc.tools.simulator.workloads import (
    ATTENTIONSTORE_SHAPE,
    ConversationShape,
    attentionstore,
    l_eval,
    sharegpt4,
)
from sglang_hc.tools.workloads.agents import agents
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.sessions import Workload

GENERATORS: dict[str, Callable[..., Workload]] = {
    "attentionstore": attentionstore,
    "sharegpt4": sharegpt4,
    "l-eval": l_eval,
    "agents": agents,
}


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Options of the load, the model, the server and the machine. Checked when they are used."""
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
    load.add_argument(
        "--multi-turn-share", metavar="P", help="of attentionstore's sessions (default: 0.73)"
    )
    load.add_argument(
        "--tokens-per-turn", metavar="N", help="attentionstore's, in the mean (default: 865)"
    )
    load.add_argument(
        "--closed-loop",
        action="store_true",
        help="later turns of a server's --hc-trace wait for the answer before, and then as long as "
        "they did in the record; those of other loads always do",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=True,
        metavar="NAME|CONFIG",
        help=f"{', '.join(MODEL_NAMES)}, or a config.json or the folder of one",
    )
    model.add_argument(
        "--forms",
        default="kv",
        metavar="auto|PLAN",
        help="kv, hidden, e.g. hidden:20,kv:20, or what a server chooses on this machine "
        "(default: kv)",
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
    _add_server_options(parser.add_argument_group("server"))
    _add_machine_options(parser.add_argument_group("machine"))


def _add_server_options(server: argparse._ArgumentGroup) -> None:
    defaults = Serving()
    server.add_argument(
        "--batch",
        metavar="N",
        default=str(defaults.max_batch),
        help="largest batch (default: %(default)s)",
    )
    server.add_argument(
        "--chunked-prefill-size",
        metavar="N",
        default=str(defaults.chunk),
        help="tokens of prompts in one pass; 0 for whole prompts (default: %(default)s)",
    )
    server.add_argument(
        "--enable-mixed-chunk",
        action="store_true",
        help="running requests decode in the passes over prompts",
    )
    server.add_argument(
        "--kv-tokens",
        metavar="N",
        help="KV pool, for running requests and idle state (default: no limit for running ones, "
        "--hbm-gb for idle state)",
    )
    server.add_argument("--hbm-gb", metavar="X", help="device memory for idle state (default: 0)")
    server.add_argument(
        "--output-cap",
        metavar="N",
        help="tokens that are decoded of an answer at most; histories have all of it",
    )
    server.add_argument(
        "--read-buffer",
        action="store_true",
        help="restore whatever waits in host memory ahead, as AttentionStore does; a server only "
        "what is best loaded whole",
    )


def _add_machine_options(machine: argparse._ArgumentGroup) -> None:
    base = ATTENTIONSTORE_MACHINE
    machine.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="as for `plan` (default: AttentionStore's A100 and its executor's host work)",
    )
    machine.add_argument(
        "--gpu-tflops",
        metavar="X",
        help=f"sustained, of one GPU, in place of --gpu (default: {base.flops / 1e12:g})",
    )
    machine.add_argument(
        "--link-gbps",
        metavar="X",
        help=f"host to device, 1e9 bytes/s (default: the GPU's, or {base.link / 1e9:g})",
    )
    machine.add_argument(
        "--disk-gbps",
        metavar="X",
        help=f"all disks together, 1e9 bytes/s (default: {base.disk / 1e9:g})",
    )
    machine.add_argument(
        "--profile",
        metavar="FILE",
        help="what `sglang-hc profile` has measured, in place of all of these",
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
    if think is not None and args.workload == "agents":
        raise UsageError("--think: agents wait as long as their tools take; leave it out")
    shape = _read_shape(args)
    if args.workload in GENERATORS:
        given = {"sessions": sessions, "rate": rate, "think": think, "alpha": alpha, "shape": shape}
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
        timing = Timing(rate, think or 0.0, args.seed)
        return read_trace(path, timing, closed_loop=args.closed_loop)


def _read_shape(args: argparse.Namespace) -> ConversationShape | None:
    """AttentionStore's conversations with other statistics; None for its own. Raises UsageError."""
    shape = ATTENTIONSTORE_SHAPE
    for option, name, low, high in (
        ("--multi-turn-share", "multi_turn_share", 0.01, 1.0),
        ("--tokens-per-turn", "tokens_per_turn", 2.0, 1e6),
    ):
        text = getattr(args, name)
        if text is not None:
            if args.workload != "attentionstore":
                raise UsageError(f"{option}: only attentionstore has it; leave it out")
            shape = replace(shape, **{name: number(option, text, low, high)})
    return None if shape is ATTENTIONSTORE_SHAPE else shape


def read_setup(args: argparse.Namespace, dram: float, disk: float, policy: str) -> Setup:
    """Load, model, server and machine, with tiers of so many bytes; disk also says whether a disk
    is part of the machine. Raises UsageError."""
    machine = _read_machine(args)
    tiers = (SourceTier.HOST, SourceTier.DISK) if disk else (SourceTier.HOST,)
    model = _read_model(args, machine, tiers)
    kv_tokens = None
    if args.kv_tokens is not None:
        if args.hbm_gb is not None:
            raise UsageError("--hbm-gb: --kv-tokens holds idle state too; leave one of them out")
        kv_tokens = count("--kv-tokens", args.kv_tokens, low=2 * BLOCK_TOKENS)
        model = replace(model, context=min(model.context, kv_tokens - BLOCK_TOKENS))
    return Setup(
        workload=read_workload(args),
        model=model,
        dram=dram,
        disk=disk,
        device=number("--hbm-gb", args.hbm_gb or "0") * 1e9,
        policy=policy,
        machine=machine,
        serving=_read_serving(args),
        kv_tokens=kv_tokens,
    )


def _read_serving(args: argparse.Namespace) -> Serving:
    cap = args.output_cap
    return Serving(
        max_batch=count("--batch", args.batch),
        chunk=count("--chunked-prefill-size", args.chunked_prefill_size, low=0),
        mixed=args.enable_mixed_chunk,
        overflow=args.overflow,
        output_cap=None if cap is None else count("--output-cap", cap),
        read_buffer=args.read_buffer,
    )


def _read_model(
    args: argparse.Namespace, machine: AnyMachine, tiers: tuple[SourceTier, ...]
) -> SimulatedModel:
    """The model and its layer plan. Raises UsageError."""
    gpus = None if args.gpus is None else count("--gpus", args.gpus)
    context = None if args.context is None else count("--context", args.context, low=128)
    auto = args.forms == "auto"
    with blaming("--model, --forms"):
        model = load_model(args.model, "kv" if auto else args.forms, gpus, context)
    if isinstance(machine, MeasuredMachine):
        with blaming("--profile"):
            model = machine.serve(model)
        if not set(tiers) <= machine.profile.copies.keys():
            raise UsageError(
                f"--profile {args.profile}: has no costs for disk; write a new one with "
                "sglang-hc profile --hc-disk DIR"
            )
        hidden = model.layout.plan.hidden and not auto
        if hidden and machine.profile.project is None:
            raise UsageError(
                f"--forms {args.forms}: {args.profile} has no costs for hidden states, which a "
                "server here would not keep; give kv or auto"
            )
    return with_auto_plan(model, machine, tiers) if auto else model


def _read_machine(args: argparse.Namespace) -> AnyMachine:
    if args.profile is not None:
        for option in ("--gpu", "--gpu-tflops", "--link-gbps", "--disk-gbps"):
            if getattr(args, option[2:].replace("-", "_")) is not None:
                raise UsageError(f"{option}: --profile has all costs; leave one of them out")
        with blaming("--profile"):
            return MeasuredMachine(read_profile(args.profile), args.profile)
    base = ATTENTIONSTORE_MACHINE
    if args.gpu is not None:
        if args.gpu_tflops is not None:
            raise UsageError("--gpu-tflops: --gpu has its own; leave one of them out")
        with blaming("--gpu"):
            gpu = load_hardware(args.gpu)
        link = gpu.link_gbps.value * 1e9
        base = replace(
            base,
            flops=gpu.flops,
            memory_bandwidth=gpu.memory_bandwidth,
            link=link,
            host_work=SERVER_HOST_WORK,
        )
    given: dict[str, Any] = {
        name: number(option, text, low=1e-6) * unit
        for option, name, text, unit in (
            ("--gpu-tflops", "flops", args.gpu_tflops, 1e12),
            ("--link-gbps", "link", args.link_gbps, 1e9),
            ("--disk-gbps", "disk", args.disk_gbps, 1e9),
        )
        if text is not None
    }
    return replace(base, **given)


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
