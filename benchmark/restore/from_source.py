"""Time to the first token of a request whose history lies on a disk or in a store of a given speed.

    PYTHONPATH=python:test python benchmark/restore/from_source.py --quick --out FILE [--plot FILE]

One engine per form serves single requests in this machine's memory. The source is the server's own
disk tier in a scratch directory: as fast as it is (`disk`), or behind a token bucket. The rates of
the buckets follow from what was measured: the balance, at which reading the shortest history takes
as long as computing it, a quarter of it, and four times it. `file` is SGLang's store of files.

    recompute   nothing of the history is stored
    serial      the whole history is read, then restored
    overlapped  what the server does: by its costs, one of these or a meeting of both

`bound_ms` is the larger of disk and compute (on a CPU the link is the compute's) over the best
split, `predicted_ms` what the server's planner expects of the arm. Tokens are the tests' business.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test")]

from cases import answer, run_case  # noqa: E402

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan  # noqa: E402
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy  # noqa: E402
from sglang_hc.policy.line_fit import Line  # noqa: E402
from sglang_hc.policy.meeting import History, best_split  # noqa: E402
from sglang_hc.policy.restore_plan import Span, plan_restore  # noqa: E402
from sglang_hc.store.disk import DiskStore  # noqa: E402
from sglang_hc.store.disk.backend import DirectBackend, File  # noqa: E402
from sglang_hc.tools.bench import machine  # noqa: E402

NEW = 64
FACTORS = (0.25, 1.0, 4.0)
ARMS = ("recompute", "serial", "overlapped")
POOL_SPARE = 1024


class Bucket:
    """Lets so many bytes a second through, whoever reads; None for any number."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free = 0.0
        self._lock = threading.Lock()

    def pass_through(self, count: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self.rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class MeteredFile:
    """A file whose reads pass a bucket."""

    def __init__(self, file: File, bucket: Bucket) -> None:
        self._file, self._bucket = file, bucket

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._bucket.pass_through(sum(map(len, buffers)))
        return self._file.read(buffers, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class MeteredBackend(DirectBackend):
    """The real disk behind a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(direct=False)
        self._bucket = bucket

    def open(self, path: str, create: bool = False) -> File:
        return MeteredFile(super().open(path, create), self._bucket)


class Server:
    """SGLang's scheduler with the tiers in this process, and one source below host memory."""

    def __init__(self, model: str, form: str, longest: int, folder: str, source: str) -> None:
        from sglang_hc.queue import prefetch
        from sglang_hc.store import disk_tier
        from support.core import Core

        prefetch.PATIENCE = disk_tier.READ_DEADLINE_S = 600.0  # the serial arm waits for all
        self.bucket = Bucket()
        opened = DiskStore.open
        DiskStore.open = lambda *args, **options: opened(  # type: ignore[method-assign,assignment]
            *args, backend=MeteredBackend(self.bucket), **options
        )
        below = ["--hc-disk", f"{folder}:8"]
        if source == "file":
            config = json.dumps({"dir": folder})
            below = ["--hc-remote", "file", "--hc-remote-config", config]
        self.core = Core(
            "--hc-forms", form, *below, "--max-total-tokens", str(longest + POOL_SPARE),
            "--dtype", "float32", "--hc-host-size-gb", "1.5", "--hc-scrub-mb-s", "0",
            "--chunked-prefill-size", str(longest + POOL_SPARE),
            model=model, profile=None, SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
        )  # fmt: skip
        self.tiers = self.core.tree.tiers
        self.planner = self.tiers.restorer.planner
        self.costs = self.planner._costs
        assert self.costs is not None, "the server could not measure its costs"
        self.plan: LayerPlan = self.tiers.restorer.path.pool.layout.plan
        self.token_bytes = self.tiers.restorer.path.pool.layout.slot_bytes / BLOCK_TOKENS

    @property
    def model(self) -> CostModel:
        model: CostModel = self.costs.model
        return model

    def throttle(self, bytes_per_s: float | None) -> None:
        """The source delivers so much, and the costs say so; None for what the disk itself does."""
        self.bucket.rate = bytes_per_s
        if bytes_per_s is None:
            return
        layers = self.plan.hidden + self.plan.kv
        line = Line(0.0, self.token_bytes / layers / bytes_per_s)
        hidden = line if self.model.project is not None else None
        measured = replace(
            self.costs.measured,
            copies={**self.costs.measured.copies, SourceTier.DISK: TierCopy(line, hidden)},
        )
        self.costs.measured = self.costs.model = measured

    def forget(self) -> None:
        self.core.settle()
        assert self.core.scheduler.flush_cache()

    def ttft(self, prompt: list[int], arm: str) -> float:
        """Seconds from the arrival of a request to its first token, nothing but the source warm."""
        disk, planner = self.tiers.disk, self.planner
        wants, disk._io.wants = disk._io.wants, lambda block_id: False  # nothing is written
        planner._always = arm == "serial"
        salt = f"never stored {time.monotonic()}" if arm == "recompute" else None
        begin = time.perf_counter()
        reply = self.core.ask(prompt, 1, salt)
        seconds = time.perf_counter() - begin
        planner._always, disk._io.wants = False, wants
        assert arm != "serial" or reply.cached > 0, "nothing was read"
        self.forget()
        return seconds


def balance(server: Server, history: int) -> float:
    """Bytes per second at which reading a history takes as long as computing it."""
    seconds = server.plan.num_layers * server.model.prefill_layer(history, 0)
    return server.token_bytes * history / seconds


def expected(server: Server, tier: SourceTier, history: int) -> dict[str, float]:
    """The planner's seconds by arm, and the bound."""
    cost, plan, layers = server.model, server.plan, server.plan.num_layers
    stored = history // BLOCK_TOKENS * BLOCK_TOKENS
    new = history + NEW - stored
    read = cost.copy_stored(tier, plan, stored)
    host = plan_restore(cost, plan, [Span(SourceTier.HOST, stored)], context=0, new=new)
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
        "overlapped": best_split(cost, plan, tier, History(0, stored, 0, new)).seconds,
        "bound": min(whole, *(bound(head) for head in range(0, stored + 1, BLOCK_TOKENS))),
    }


def measure(server: Server, source: str, histories: list[int], rounds: int) -> list[dict]:
    """Rows of all cells of one engine."""
    rng = random.Random(1)
    vocabulary = server.core.scheduler.tp_worker.model_runner.model_config.vocab_size
    prompts = {}
    for history in histories:
        prompts[history] = [rng.randrange(3, vocabulary) for _ in range(history + NEW)]
        server.core.ask(prompts[history][:history], 1)
        server.forget()
    server.core.believe_profile()
    level = balance(server, histories[0])
    rates: list[float | None] = [None] if source != "bucket" else [f * level for f in FACTORS]
    tier = SourceTier.REMOTE if source == "file" else SourceTier.DISK
    rows = []
    for rate in rates:
        server.throttle(rate)
        if tier not in server.model.copies:  # a store's speed is what its reads take
            server.ttft(prompts[histories[0]], "serial")
        for history in histories:
            times: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for _ in range(rounds):
                for arm in ARMS:
                    times[arm].append(server.ttft(prompts[history], arm))
            seconds = expected(server, tier, history)
            read = server.model.copy_stored(tier, server.plan, history) / history
            for arm in ARMS:
                row = {
                    "source": source,
                    "source_gbps": server.token_bytes / read / 1e9,
                    "history": history,
                    "form": str(server.plan),
                    "arm": arm,
                    "ttft_ms": 1e3 * statistics.median(times[arm]),
                    "bound_ms": 1e3 * seconds["bound"],
                    "predicted_ms": 1e3 * seconds[arm],
                    "all_ms": [1e3 * value for value in times[arm]],
                }
                rows.append(row)
                print(
                    f"{source} {row['source_gbps']:.4f} GB/s {history} {row['form']} {arm}: "
                    f"{row['ttft_ms']:.0f} ms, bound {row['bound_ms']:.0f}, "
                    f"predicted {row['predicted_ms']:.0f}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    return rows


def case(spec: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = Server(spec["model"], spec["form"], max(spec["histories"]), folder, spec["source"])
        rows = measure(server, spec["source"], spec["histories"], spec["rounds"])
        counted = {
            name: value
            for name, value in server.core.tree.stats().items()
            if isinstance(value, int) and ("meet" in name or "observations" in name)
        }
        answer({"rows": rows, "counted": counted})


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """TTFT against the rate of the source, points as measured, lines as predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cells = sorted({(row["form"], row["history"]) for row in rows})
    figure, panels = plt.subplots(1, len(cells), figsize=(4.2 * len(cells), 3.8), squeeze=False)
    colours = dict(zip(ARMS, ("#444444", "#d95f02", "#1b9e77"), strict=True))
    for axes, (form, history) in zip(panels[0], cells, strict=True):
        for arm in ARMS:
            mine = sorted(
                (row["source_gbps"], row["ttft_ms"], row["predicted_ms"])
                for row in rows
                if (row["form"], row["history"], row["arm"]) == (form, history, arm)
            )
            gbps, measured, predicted = zip(*mine, strict=True)
            axes.plot(gbps, measured, "o", color=colours[arm], label=arm)
            axes.plot(gbps, predicted, "-", color=colours[arm], linewidth=1)
        axes.set(
            xscale="log", yscale="log", title=f"{history} tokens, {form}",
            xlabel="source, GB/s", ylabel="time to first token, ms",
        )  # fmt: skip
        axes.grid(alpha=0.3)
    panels[0][0].legend(title="points measured, lines predicted", fontsize=7, title_fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="folder below models/")
    parser.add_argument("--quick", action="store_true", help="6 cells, one round")
    parser.add_argument("--histories", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--forms", nargs="+", default=["kv", "hidden"])
    parser.add_argument(
        "--sources", nargs="+", default=["bucket"], choices=["bucket", "disk", "file"]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        case(json.loads(options.case))
        return 0
    if options.quick:
        options.histories, options.forms = [512, 1024], ["kv"]
        options.sources, options.rounds = ["bucket"], 1
    rows, counted = [], []
    for source in options.sources:
        for form in options.forms:
            spec = {
                "model": options.model, "form": form, "histories": options.histories,
                "source": source, "rounds": options.rounds,
            }  # fmt: skip
            found = run_case(__file__, spec, timeout=3600)
            rows += found["rows"]
            counted.append({"source": source, "form": form, **found["counted"]})
    for row in rows:
        print(
            f"{row['source']:6} {row['source_gbps']:8.4f} GB/s {row['history']:5} {row['form']:10} "
            f"{row['arm']:10} {row['ttft_ms']:8.0f} ms  bound {row['bound_ms']:8.0f}  "
            f"predicted {row['predicted_ms']:8.0f}"
        )
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": machine.describe(),
        "model": options.model,
        "dtype": "float32",
        "new_tokens": NEW,
        "rounds": options.rounds,
        "counted": counted,
        "rows": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot is not None:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
