"""Passes with state in host memory, by the share of tokens that are kept as hidden states.

    sglang-hc profile --model models/demo --output PROFILE -- --load-format dummy
    python -m benchmark.throughput.shares --link-gbps 0.4 --profile PROFILE --json OUT    # a CPU
    python -m benchmark.throughput.shares --shape llama-2-13b --shares 0,0.5,1    # a GPU
    python -m benchmark.throughput.shares --rehearse

Each share is an engine of its own (`--hc-throughput act:SHARE`), with all weights in host memory;
so is the share that `best_split` (policy/hybrid.py) finds for these requests by the costs that the
server measured, and with --profile by decode steps that `sglang-hc profile` has timed, as in a
server with --hc-profile. A pass brings all requests one token, and is timed from one iteration of
the scheduler's loop to the next while all of them decode.

The arm `offload` is `--hc-offload-gb` alone: the same passes with state on the device, and the
first token of a conversation that has left it, restored and recomputed.

With --link-gbps copies from host memory pass a token bucket (harness/throttled.py), which runs
beside the computation as a GPU's link does. Passes are then timed by what their thread computes and
what it waits for the link, because other work on a shared machine slows the one and not the other;
that the thread copies the bytes too is left out, because a GPU's copy engines do that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmark import ROOT
from benchmark.gpu.settings import SHAPES, make_shape, rehearsal
from benchmark.harness import machine
from benchmark.harness.cases import answer, kept_case
from benchmark.harness.cells import CellFile, rounded
from benchmark.harness.core import FREE_LOADING
from benchmark.harness.report import Table
from benchmark.harness.throttled import ThrottledCopyStream
from sglang_hc.errors import ConfigError
from sglang_hc.policy.hybrid import best_split
from sglang_hc.policy.streamed_pass import Load, StreamedModel
from sglang_hc.profile_file import read_profile

ELEVEN = ",".join(f"{tenth / 10:g}" for tenth in range(11))
OFFLOAD, PLANNED = "offload", "planned"
HALF = "0.5"
"""The share of the engine that measures the costs."""

CPU_MODEL = ("demo", "--load-format dummy")
"""A folder of models/, and flags."""

NEW_TURN = 64
"""Tokens of a conversation's new turn."""


class OwnTime:
    """The time of this thread, whatever else a shared machine does meanwhile: what it computes, and
    what it would wait for the link."""

    def __init__(self) -> None:
        self._more = 0.0

    def __call__(self) -> float:
        return time.thread_time() + self._more

    def wait(self, seconds: float) -> None:
        self._more += seconds

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """What is done inside takes no time."""
        begin = time.thread_time()
        yield
        self._more -= time.thread_time() - begin


class OwnLink(ThrottledCopyStream):
    """A link on such a clock, which copies by itself."""

    def __init__(self, bytes_per_s: float, own: OwnTime) -> None:
        super().__init__(bytes_per_s, own, own.wait)
        self._own = own

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._own.left_out():
            super().copy(target, source)

    def opposite(self) -> ThrottledCopyStream:
        if self._opposite is None:
            self._opposite = OwnLink(self.bytes_per_s, self._own)
            self._opposite._opposite = self
        return self._opposite


@contextlib.contextmanager
def link_of(bytes_per_s: float | None, own: OwnTime | None) -> Iterator[None]:
    """Engines that are built inside copy so fast from host memory, all together, by a clock of
    their own or else in real time; None: as fast as the machine does."""
    if bytes_per_s is None:
        yield
        return
    from sglang_hc.srt.hybrid import build as streamed
    from sglang_hc.srt.model import offload, scratch_layer
    from sglang_hc.srt.start import build

    link = ThrottledCopyStream(bytes_per_s) if own is None else OwnLink(bytes_per_s, own)
    with contextlib.ExitStack() as patches:
        for module in (streamed, offload, scratch_layer, build):
            patches.enter_context(mock.patch.object(module, "copy_stream_for", lambda *_: link))
        yield


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """One engine. `pass_s`: the median of passes in which all requests decode."""
    from benchmark.harness.core import Core

    batch, prompt, new = case["requests"], case["prompt"], case["new"]
    tokens = batch * (prompt + new) + 1024
    arm = case["arm"]
    words = ["--hc-offload-gb", "1000", "--max-total-tokens", str(tokens)]
    words += ["--max-running-requests", str(batch), *shlex.split(case["server_args"])]
    if arm == OFFLOAD:
        words += ["--disable-overlap-schedule", "--hc-forms", "kv"]
    else:
        words += ["--hc-throughput", f"act:{arm},rounds:1,device-act-gb:0"]
    own = OwnTime() if case["bytes_per_s"] and not case["costs"] else None
    clock: Callable[[], float] = own or time.perf_counter
    with tempfile.TemporaryDirectory() as cache, link_of(case["bytes_per_s"], own):
        os.environ["XDG_CACHE_HOME"] = cache  # costs are measured here, with this link
        core = Core(
            *words, model=case["model"], profile=None if case["costs"] else str(FREE_LOADING),
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
        )  # fmt: skip
    runner = core.scheduler.tp_worker.model_runner
    rng = random.Random(1)

    def drawn(count: int) -> list[int]:
        return [rng.randrange(3, 900) for _ in range(count)]

    notes: list[tuple[float, bool]] = []

    def noted(_: int) -> None:
        scheduler = core.scheduler
        together = len(scheduler.running_batch.reqs) == batch and not scheduler.waiting_queue
        notes.append((clock(), together and scheduler.chunked_req is None))

    for _ in range(batch):
        core.submit(drawn(prompt), new)
    core.run(each_pass=noted)
    full = [end - begin for (begin, a), (end, b) in pairwise(notes) if a and b]
    found: dict[str, Any] = {"pass_s": statistics.median(full[1:]), "passes": len(full) - 1}
    if arm == OFFLOAD:
        return found | _returning(core, drawn(prompt), drawn)
    found["model"] = dataclasses.asdict(runner.attn_backend.streamed.plan.model)
    return found


def _returning(core: Any, history: list[int], drawn: Any) -> dict[str, float]:
    """Seconds until the first token of a new turn behind a history."""
    core.ask(history, 1)
    core.settle()
    found: dict[str, float] = {"link_s": 0.0}
    if core.model_state.cost is not None:
        found["link_s"] = core.model_state.cost.weights * core.model_state.plan.num_layers
    for arm, salt in (("restored_s", None), ("recomputed_s", "never stored")):
        core.evict()
        begin = time.perf_counter()
        core.ask([*history, *drawn(NEW_TURN)], 1, salt)
        found[arm] = time.perf_counter() - begin
        core.settle()
    return found


def decode_reads(profile: str) -> float:
    """Seconds to read K and V of a token in a decode step. Raises ConfigError for a profile that a
    server has written, which has none."""
    step = read_profile(profile).step
    if step is None:
        raise ConfigError(f"--profile {profile}: no decode steps; give one of sglang-hc profile")
    return step.per_context


def planned_share(model: StreamedModel, load: Load) -> float:
    """What `best_split` finds where all weights cross and nothing stays on the device."""
    split = best_split(model, load, 1, most_resident=0, most_on_device=0)
    assert split is not None, "these requests do not fit"
    return round(split.act / split.tokens, 3)


def table_of(found: dict[str, dict[str, Any]], load: Load, share: float) -> Table:
    """Measured beside modelled passes, and the planned one over the best of the others."""
    measured = {arm: one["pass_s"] for arm, one in found.items() if arm != OFFLOAD}
    best = min(seconds for arm, seconds in measured.items() if arm != PLANNED)
    model = StreamedModel(**found[PLANNED]["model"])
    rows = []
    for arm, seconds in measured.items():
        act = share if arm == PLANNED else float(arm)
        split = best_split(model, load, 1, act=act, most_resident=0, most_on_device=0)
        expected = "" if split is None else f"{1e3 * model.times(load, split).ahead:.0f}"
        name = f"{share:.3f}, planned" if arm == PLANNED else arm
        rows.append((name, f"{1e3 * seconds:.0f}", expected, f"{seconds / best:.2f}"))
    columns = ("share of hidden states", "pass, ms", "modelled, ms", "over the best share")
    return Table("shares", columns, tuple(rows))


def run(file: CellFile, name: str, case: dict[str, Any]) -> dict[str, Any] | None:
    """One engine, kept under a key; None when it failed."""
    module = machine.module(__file__)
    found: dict[str, Any] | None = kept_case(
        file, name, module, case, lambda times: {"arm": case["arm"], **times}
    )
    if found is not None:
        print(f"{name}: a pass of {1e3 * found['pass_s']:.1f} ms", flush=True)
    return found


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, help="with dummy weights (default: the demo's)")
    parser.add_argument("--shares", default=ELEVEN)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=384)
    parser.add_argument("--new", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1, help="engines of each share, in turns")
    parser.add_argument("--link-gbps", type=float, help="of the token bucket, 1e9 bytes/s")
    parser.add_argument("--profile", help="of `sglang-hc profile`, for its decode steps")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--models", type=Path, default=ROOT / "models", help="where shapes go")
    parser.add_argument("--cells", type=Path, help="keep every engine's times in this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, too")
    parser.add_argument("--rehearse", action="store_true", help="tiny and short, for a CPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    args = parsed(words)
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    about = machine.about("throughput-shares")
    model, flags = CPU_MODEL
    if args.shape is not None:
        model = str(make_shape(args.shape, args.models).resolve())
        flags = "--load-format dummy --dtype bfloat16"
    if args.rehearse:
        args.shape = args.shape or "llama-2-13b"
        model = str(make_shape(args.shape, args.models).resolve())
        flags = f"--load-format dummy --dtype float32 {rehearsal(args.shape)}"
        args.shares, args.requests, args.prompt, args.new = HALF, 2, 48, 8
    case = {
        "model": model, "requests": args.requests, "prompt": args.prompt, "new": args.new,
        "bytes_per_s": args.link_gbps and 1e9 * args.link_gbps,
        "server_args": f"{flags} {args.server_args}".strip(), "costs": True,
    }  # fmt: skip
    load = Load(args.requests, args.requests * (args.prompt + args.new / 2), args.requests)
    file = CellFile(args.cells, "throughput")
    name = f"throughput/{'tiny ' if args.rehearse else ''}{args.shape or model}"
    asked = run(file, f"{name}/costs", {**case, "arm": HALF})
    if asked is None:
        return 1
    if args.profile is not None:
        asked["model"]["read_kv"] = decode_reads(args.profile)
    share = planned_share(StreamedModel(**asked["model"]), load)
    arms = {one: one for one in args.shares.split(",")} | {PLANNED: str(share)}
    if args.link_gbps is None:
        arms[OFFLOAD] = OFFLOAD
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    if HALF in found and args.link_gbps is None:
        found[HALF].append(asked)
    good = True
    for number in range(args.rounds):
        for arm, spec in arms.items():
            if len(found[arm]) > number:
                continue
            costs = arm == OFFLOAD
            one = run(file, f"{name}/{arm}/{number}", {**case, "arm": spec, "costs": costs})
            good &= one is not None
            found[arm] += [one] if one is not None else []
    if not good:
        return 1
    medians = {
        arm: {**ones[0], "pass_s": statistics.median(one["pass_s"] for one in ones)}
        for arm, ones in found.items()
    }
    medians[PLANNED]["model"] = asked["model"]
    table = table_of(medians, load, share)
    print(table.markdown())
    if args.json:
        tables = {table.title: {"columns": table.head, "rows": table.rows}}
        result = {**about, "tables": tables, "share": share, "engines": found}
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
