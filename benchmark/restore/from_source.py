"""Time to the first token of a request whose history lies on a disk or in a store of a given speed.

    python -m benchmark.restore.from_source --quick --out FILE [--plot FILE] [--cells FILE]

The server's scheduler serves single requests in this process (source_server.py). Sources:

    disk        this machine's disk, read without the page cache
    bucket      the same behind token buckets: at the balance, where reading a history takes as long
                as computing it, at a quarter of it, and at four times
    file        SGLang's store of files, as a remote store
    slow-file   the same behind a token bucket at the balance
    restart     the disk of a server that was closed and started again

    recompute   nothing of the history is stored
    serial      the whole history is read, then restored
    overlapped  what the server does: by its costs, one of these or a meeting of both

Each server first learns its costs from 20 requests (source_server.py). `bound_ms` is the larger of
disk and compute (on a CPU the link is the compute's) over the best split, `predicted_ms` what the
server's planner expects of the arm. Tokens are the tests' business.
With --cells each history is kept as soon as it is measured, and not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmark.harness import cells, machine
from benchmark.harness.cases import answer, run_case
from benchmark.restore.source_report import ARMS, line_of, plot, tables_of
from benchmark.restore.source_server import NEW, SourceServer
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.meeting import best_split, from_below
from sglang_hc.policy.restore_plan import plan_restore

FACTORS = (0.25, 1.0, 4.0)
"""Rates of the buckets before a disk over the balance."""

STORES = {"disk": "disk", "bucket": "disk", "file": "file", "slow-file": "file"}
SOURCES = (*STORES, "restart")
LONGEST = 8064
"""Tokens of the longest history: the demo model has 8,192 positions."""

REPEAT_S = 15.0
"""An arm that took so long in its turns takes no more of them."""

MOST_S = 35.0
"""Reading all of a history is left out where the planner expects it to take longer."""


def prompt_of(vocabulary: int, history: int, seed: int) -> list[int]:
    """A history and new tokens behind it. With one seed the longer histories begin as the shorter
    ones do."""
    rng, own = random.Random(seed), random.Random(f"{seed} {history}")
    told = [rng.randrange(3, vocabulary) for _ in range(history)]
    return told + [own.randrange(3, vocabulary) for _ in range(NEW)]


def expected(server: SourceServer, history: int) -> dict[str, float]:
    """The planner's seconds by arm, and the bound."""
    cost, plan, layers, tier = server.model, server.plan, server.plan.num_layers, server.tier
    stored = history // BLOCK_TOKENS * BLOCK_TOKENS
    new = history + NEW - stored
    read = cost.copy_stored(tier, plan, stored)
    host = plan_restore(cost, plan, stored, context=0, new=new)
    whole = layers * cost.prefill_layer(history + NEW, 0)

    def bound(head: int) -> float:
        work = layers * (cost.prefill_layer(head, 0) + cost.prefill_layer(new, stored))
        rest = stored - head
        copies = cost.copy_stored(SourceTier.HOST, plan, rest)
        project = plan.hidden * cost.project_kv(rest) if plan.hidden and rest else 0.0
        compute = work + project + (0.0 if cost.overlap else copies)
        return max(compute, copies, cost.copy_stored(tier, plan, rest) if rest else 0.0)

    return {
        "recompute": whole,
        "serial": read + host.as_stored_seconds,
        "overlapped": best_split(cost, plan, from_below(tier, stored, new)).seconds,
        "bound": min(whole, *(bound(head) for head in range(0, stored + 1, BLOCK_TOKENS))),
    }


def measure(
    server: SourceServer, prompt: list[int], rates: dict[str, float], rounds: int
) -> list[dict[str, Any]]:
    """Rows of one prompt from all sources, whose arms take turns."""
    load, history = os.getloadavg()[0], len(prompt) - NEW
    times: dict[tuple[str, str], list[float]] = {}

    def take(source: str, arm: str) -> None:
        taken = times.setdefault((source, arm), [])
        if sum(taken) < REPEAT_S:
            taken.append(server.ttft(prompt, arm))

    for _ in range(rounds):
        take("", "recompute")  # the same for all sources
        for source, rate in rates.items():
            server.throttle(rate)
            if expected(server, history)["serial"] < MOST_S:
                take(source, "serial")
            take(source, "overlapped")
    rows = []
    for source, rate in rates.items():
        server.throttle(rate)
        seconds, gbps = expected(server, history), server.gbps(history)
        for arm in ARMS:
            taken = times.get(("" if arm == "recompute" else source, arm))
            if taken is None:
                continue
            rows.append({
                "source": source, "source_gbps": gbps, "history": history,
                "form": str(server.plan), "arm": arm, "token_bytes": server.token_bytes,
                "ttft_ms": 1e3 * statistics.median(taken), "bound_ms": 1e3 * seconds["bound"],
                "predicted_ms": 1e3 * seconds[arm], "all_ms": [1e3 * value for value in taken],
                "load_average": load,
            })  # fmt: skip
    return rows


def factors_of(source: str, buckets: Sequence[float]) -> Sequence[float]:
    """Rates over the balance; 0 for what the source can."""
    return buckets if source == "bucket" else (1.0,) if source == "slow-file" else (0.0,)


def groups_of(spec: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    """History and sources of what is measured together, by the key of its cell. The price of a
    remote store is what its reads take, so one source follows the other there."""
    sources = [spec["sources"]] if spec["store"] == "disk" else [[one] for one in spec["sources"]]
    return {
        f"{spec['model']}/{spec['form']}/{'+'.join(some)}/{history}": (history, some)
        for some in sources
        for history in spec["histories"]
    }


def case(spec: dict[str, Any]) -> None:
    """Measure with one engine what the file of cells lacks."""
    file = cells.CellFile(Path(spec["cells"]), "from_source", spec["command"])
    todo = {key: group for key, group in groups_of(spec).items() if not file.has(key)}
    histories = [history for history, _ in todo.values()]
    with tempfile.TemporaryDirectory(dir=spec["dir"]) as folder:
        server = SourceServer(spec["model"], spec["form"], max(histories), folder, spec["store"])
        prompts = {h: prompt_of(server.vocabulary, h, 1) for h in histories}
        server.store_history(prompts[max(histories)][: max(histories)])
        server.learn([prompts[history] for history in histories])
        for key, (history, sources) in todo.items():
            began = time.monotonic()
            balance = server.balance(history)
            rates = {
                f"{source} x{factor:g}" if factor else source: factor * balance
                for source in sources
                for factor in factors_of(source, spec["factors"])
            }
            if spec["store"] == "file":
                server.price_store(prompts[history], *rates.values())
            before = server.meetings
            rows = measure(server, prompts[history], rates, spec["rounds"])
            counted = {name: n - before[name] for name, n in server.meetings.items()}
            values = {"rows": rows, "counted": counted, "profile": server.profile}
            file.add(key, values, time.monotonic() - began)
            for row in rows:
                print(line_of(row), file=sys.stderr, flush=True)
        server.close()
    answer({})


def before_restart(spec: dict[str, Any]) -> None:
    """Store the histories, and close the server."""
    server = SourceServer(spec["model"], spec["form"], max(spec["histories"]), spec["dir"], "disk")
    for history in spec["histories"]:
        server.store_history(prompt_of(server.vocabulary, history, history)[:history])
    server.close()
    answer({})


def after_restart(spec: dict[str, Any]) -> None:
    """Serve each history's next turn once from the cold disk, and compute it once."""
    server = SourceServer(spec["model"], spec["form"], max(spec["histories"]), spec["dir"], "disk")
    server.believe()
    # Memory that a first long prompt takes from the system is not what is measured.
    server.core.ask([3] * max(spec["histories"]), 1)
    server.forget()
    server.take_pages()
    rows = []
    for history in spec["histories"]:
        prompt, load = prompt_of(server.vocabulary, history, history), os.getloadavg()[0]
        seconds, gbps = expected(server, history), server.gbps(history)
        for arm in ("overlapped", "recompute"):
            taken = 1e3 * server.ttft(prompt, arm)
            rows.append({
                "source": "restart", "source_gbps": gbps, "history": history,
                "form": str(server.plan), "arm": arm, "ttft_ms": taken,
                "bound_ms": 1e3 * seconds["bound"], "predicted_ms": 1e3 * seconds[arm],
                "load_average": load,
            })  # fmt: skip
    server.close()
    answer(rows)


def restart(spec: dict[str, Any]) -> None:
    """Every round is a server that starts over the same directory, whose files no cache holds."""
    file = cells.CellFile(Path(spec["cells"]), "from_source", spec["command"])
    rounds: list[list[dict[str, Any]]] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=spec["dir"]) as folder:
        run_case(machine.module(__file__), {**spec, "dir": folder, "part": "before"})
        for _ in range(spec["rounds"]):
            forget_files(Path(folder))
            rounds.append(
                run_case(machine.module(__file__), {**spec, "dir": folder, "part": "after"})
            )
    found = [median_of(rows) for rows in zip(*rounds, strict=True)]
    file.add(restart_key(spec), {"rows": found, "counted": {}}, time.monotonic() - began)
    for row in found:
        print(line_of(row), file=sys.stderr, flush=True)


def median_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of several servers, each with costs of its own."""
    row = {**rows[-1], "all_ms": [one["ttft_ms"] for one in rows]}
    for name in ("ttft_ms", "bound_ms", "predicted_ms"):
        row[name] = statistics.median(one[name] for one in rows)
    return row


def forget_files(folder: Path) -> None:
    """Nothing of these files stays in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def restart_key(spec: dict[str, Any]) -> str:
    return f"{spec['model']}/{spec['form']}/restart/{'+'.join(map(str, spec['histories']))}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="folder below models/")
    parser.add_argument("--quick", action="store_true", help="eight cells, one round")
    parser.add_argument("--histories", type=int, nargs="+", default=[1024, 2048, 4096, LONGEST])
    parser.add_argument("--forms", nargs="+", default=["kv", "hidden"])
    parser.add_argument("--sources", nargs="+", default=["disk", "bucket"], choices=SOURCES)
    parser.add_argument("--factors", type=float, nargs="+", default=FACTORS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cells", type=Path, help="keep every history in this file, and go on")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        spec = json.loads(options.case)
        {"all": case, "before": before_restart, "after": after_restart}[spec["part"]](spec)
        return 0
    if options.quick:
        options.histories, options.forms, options.rounds = [1024, 2048], ["kv"], 1
    with tempfile.TemporaryDirectory() as folder:
        path = options.cells or Path(folder) / "cells"
        keys = [key for spec in specs_of(options, path) for key in run(spec)]
        found = cells.latest(cells.read(path))
        report(options, [found[key] for key in keys])
    return 0


def specs_of(options: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """One engine for each, whose costs are measured when it starts, and the restarts."""
    found = []
    for form in options.forms:
        spec = {
            "model": options.model, "form": form, "histories": sorted(options.histories),
            "rounds": options.rounds, "factors": options.factors, "dir": options.dir,
            "cells": str(path), "part": "all",
            "command": cells.own_command(),
        }  # fmt: skip
        for store in ("disk", "file"):
            sources = [source for source in options.sources if STORES.get(source) == store]
            if sources:
                ours = {**spec, "store": store, "sources": sources}
                found += [{**ours, "histories": [history]} for history in spec["histories"]]
        if "restart" in options.sources:
            found.append({**spec, "store": "restart"})
    return found


def run(spec: dict[str, Any]) -> list[str]:
    """Measure what the file of cells lacks. Returns the keys of the cells."""
    file = cells.CellFile(Path(spec["cells"]), "from_source", spec["command"])
    is_restart = spec["store"] == "restart"
    keys = [restart_key(spec)] if is_restart else list(groups_of(spec))
    if not all(map(file.has, keys)):
        if is_restart:
            restart(spec)
        else:
            run_case(machine.module(__file__), spec, timeout=7200)
    return keys


def within(rows: Sequence[dict[str, Any]], share: float) -> str:
    """Of how many rows the predicted time is that near to the measured one."""
    near = sum(abs(row["predicted_ms"] / row["ttft_ms"] - 1) <= share for row in rows)
    return f"{near} of {len(rows)}"


def report(options: argparse.Namespace, measured: Sequence[dict[str, Any]]) -> None:
    """Print, write and plot what was measured, also by earlier calls."""
    rows = [row for cell in measured for row in cell["values"]["rows"]]
    for row in rows:
        print(line_of(row))
    if options.out is not None:
        told = {
            "commands": sorted({cell["command"] for cell in measured}),
            "machine": machine.describe(),
            "commits": sorted({cell["commit"] for cell in measured}),
            "model": options.model,
            "dtype": "float32",
            "new_tokens": NEW,
            "rounds": options.rounds,
            "counted": [
                {"cell": cell["key"], "at": cell["at"], **cell["values"]["counted"]}
                for cell in measured
            ],
            # Of each form's last engine; every history's predictions are those of its own engine.
            "profiles": {
                cell["values"]["rows"][0]["form"]: cell["values"]["profile"]
                for cell in measured
                if "profile" in cell["values"]
            },
            "predicted_within_15_percent": within(rows, 0.15),
            "tables": tables_of(rows),
            "rows": rows,
        }
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    if options.plot is not None:
        plot(rows, options.plot)


if __name__ == "__main__":
    sys.exit(main())
