"""A conversation that comes back after it left the device, restored and computed again in turns.

    python -m benchmark.ends.returning [--kinds windows,states] [--cells FILE] [--out FILE]
    python -m benchmark.ends.returning --stand-ins test --dtype float32 --out FILE     # on a CPU

For each kind of layer one engine with a small random model (`small.py`). First what is right: a
conversation of two turns that leaves the device between them says what one says that stays. Then
what it takes: a prompt of a history and new tokens, from its arrival to its first token, with the
history in host memory and in no cache at all, in turns. What the server does with what it has is
its own decision, by costs that it has measured at its start.

A CPU has no kernels for windows, states and an index: --stand-ins names the folder with torch in
their place, which is slower than they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import ROOT
from benchmark.ends.small import KINDS, NARROW, WIDE, make
from benchmark.harness import machine
from benchmark.harness.cases import answer, kept_case
from benchmark.harness.cells import CellFile, latest, read
from benchmark.harness.compare import tie_margin
from sglang_hc.forms import BLOCK_TOKENS

REPLY, NEW, ROOM = 24, 64, 512
"""Tokens of a reply, of a prompt behind its history, and of the KV pool beside the first prompt."""

STAND_INS = {"windows": "window_kernels", "states": "state_kernels", "index": "sparse_kernels"}
FLAGS = {
    "windows": ("--attention-backend", "intel_amx", "--moe-runner-backend", "triton"),
    "index": ("--attention-backend", "dsa"),
}
"""Under the stand-ins."""

STATES = "--max-mamba-cache-size", "24", "--max-running-requests", "4"
COLUMNS = (
    "kind", "layers", "restored tokens", "restored, ms", "computed again, ms", "times better",
    "tokens",
)  # fmt: skip


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """case: kind, model, tokens, rounds, dtype, server_args, stand_ins."""
    core, rng = _engine(case), random.Random(7)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 900) for _ in range(count)]

    prompt, more = words(case["tokens"]), words(NEW)
    said = {name: _two_turns(core, prompt, more, name) for name in ("stays", "leaves")}
    same, margin = _same(said["stays"], said["leaves"], case["dtype"])
    history = [*prompt, *said["leaves"][0].tokens]
    times: dict[str, list[float]] = {"restored": [], "computed": []}
    found = []
    for number in range(case["rounds"] + 1):  # the first one warms up
        for arm, salt in (("restored", "leaves"), ("computed", f"never said {number}")):
            tokens = [*history, *words(NEW)]
            _leave(core)
            began = time.perf_counter()
            reply = core.ask(tokens, 1, salt)
            seconds = time.perf_counter() - began
            assert not reply.device, "something stayed on the device"
            if number:
                times[arm].append(seconds)
            if arm == "restored":
                found.append(reply.host)
            assert arm == "restored" or not reply.cached, "a history that nobody told is known"
    core.settle()
    stats = core.tree.stats()
    return {
        "kind": case["kind"],
        "dtype": case["dtype"],
        "layers": _layers(core),
        "layer_plan": stats["layer_plan"],
        "history": len(history),
        "restored_tokens": min(found),
        "same_replies": same,
        "tie": margin,
        "host_tokens_of_the_second_turn": said["leaves"][1].host,
        "seconds": {arm: median(taken) for arm, taken in times.items()},
        "all_seconds": times,
    }


def _engine(case: dict[str, Any]) -> Any:
    from benchmark.harness.core import Core
    from benchmark.harness.in_process import import_engine

    flags = [*shlex.split(case["server_args"])]
    import_engine()
    if case["stand_ins"]:
        flags.append("--disable-overlap-schedule")  # see restore/source_server.py
        flags += FLAGS.get(case["kind"], ())
        if case["kind"] in STAND_INS:
            sys.path.insert(0, case["stand_ins"])
            importlib.import_module(f"support.{STAND_INS[case['kind']]}").use()
    if case["kind"] == "states":
        flags += STATES
    # In pages, so that a conversation that stayed goes on where one goes on that left.
    return Core(
        *flags, "--dtype", case["dtype"], "--page-size", str(BLOCK_TOKENS),
        "--max-total-tokens", str(case["tokens"] + ROOM), "--hc-host-size-gb", "0.5",
        "--chunked-prefill-size", str(case["tokens"] + ROOM),
        model=case["model"], profile=None,
    )  # fmt: skip


def _two_turns(core: Any, prompt: Sequence[int], more: Sequence[int], name: str) -> list[Any]:
    """Both replies; `leaves`: others write over the device between the turns."""
    first = core.ask(prompt, REPLY, name)
    if name == "leaves":
        core.settle()
        core.flood(random.Random(1), core.scheduler.max_total_num_tokens)
    return [first, core.ask([*prompt, *first.tokens, *more], REPLY, name, top=2)]


def _same(stayed: list[Any], left: list[Any], dtype: str) -> tuple[bool, float | None]:
    """Whether both say the same, and where they part how close the two tokens were where it stayed.
    Two that are as close as rounding goes count as the same; None: they do not part."""
    if stayed[0].tokens != left[0].tokens:
        return False, None
    pairs = zip(stayed[1].tokens, left[1].tokens, stayed[1].top, strict=True)
    for wanted, got, top in pairs:
        if wanted != got:
            margin = top[wanted] - top[got] if got in top else float("inf")
            return abs(margin) <= tie_margin(dtype), margin
    return True, None


def _leave(core: Any) -> None:
    """Everything leaves the device, and what is saved is."""
    core.settle()
    core.evict()


def _layers(core: Any) -> str:
    """How many layers keep something of each token, of all."""
    every = core.scheduler.tp_worker.model_runner.model_config.num_hidden_layers
    ends = core.tree.tiers.ends
    others = 0
    if ends is not None:
        others = len(ends.layout.window.layers) + len(ends.layout.state.layers)
    return f"{every - others} of {every}"


def main() -> int:
    """Returns the exit status: 0 when every kind came back and said the same."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=1024, help="of the first prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--models", type=Path, default=Path("out/returning"), help="made here")
    parser.add_argument("--stand-ins", type=Path, help="folder of torch for GPU kernels: test")
    parser.add_argument("--rehearse", action="store_true", help="narrow models, short, on a CPU")
    parser.add_argument("--server-args", default="", help="further SGLang flags")
    parser.add_argument("--cells", type=Path, help="keep every kind in this file")
    parser.add_argument("--out", type=Path, help="write the table and all times to this file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    if args.rehearse:
        args.tokens, args.rounds, args.dtype = 256, 1, "float32"
        args.stand_ins = args.stand_ins or ROOT / "test"
    file = CellFile(args.cells, "returning")
    found = [_row(args, file, kind) for kind in args.kinds.split(",")]
    rows = [row for row in found if row is not None]
    if args.out is not None:
        _write(args.out, rows)
    return 0 if len(rows) == len(found) and all(map(good, rows)) else 1


def _row(args: argparse.Namespace, file: CellFile, kind: str) -> dict[str, Any] | None:
    """Of one kind, measured before or now; None where that failed."""
    key = f"returning/{kind}/{args.tokens}/{args.dtype}"
    if file.has(key):
        assert file.path is not None
        known: dict[str, Any] = latest(read(file.path))[key]["values"]
        return known
    size = NARROW if args.rehearse else WIDE
    model = make(args.models, kind, size, on_cpu=args.stand_ins is not None)
    case = {
        "kind": kind, "model": str(model.resolve()), "tokens": args.tokens, "rounds": args.rounds,
        "dtype": args.dtype, "server_args": args.server_args,
        "stand_ins": str(args.stand_ins.resolve()) if args.stand_ins else "",
    }  # fmt: skip
    row: dict[str, Any] | None = kept_case(file, key, machine.module(__file__), case, dict)
    if row is not None:
        print(f"{'ok ' if good(row) else 'BAD'} {' | '.join(cells_of(row))}", flush=True)
    return row


def good(row: dict[str, Any]) -> bool:
    """It came back, and said the same. How fast is for a reader."""
    return bool(row["same_replies"]) and row["host_tokens_of_the_second_turn"] > 0


def cells_of(row: dict[str, Any]) -> list[str]:
    """Of the table."""
    restored, computed = (row["seconds"][arm] for arm in ("restored", "computed"))
    same = "equal" if row["tie"] is None else f"a near tie of {row['tie']:.3f}"
    return [
        row["kind"], row["layers"], f"{row['restored_tokens']:,} of {row['history'] + NEW:,}",
        f"{1e3 * restored:.0f}", f"{1e3 * computed:.0f}", f"{computed / restored:.2f}",
        same if row["same_replies"] else "differ",
    ]  # fmt: skip


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    table = {"columns": COLUMNS, "rows": [cells_of(row) for row in rows]}
    result = {**machine.about("returning"), "tables": {"kinds": table}, "kinds": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
