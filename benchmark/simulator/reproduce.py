"""Run every simulation behind the tables of README.md and write their results as JSON.

    python -m benchmark.simulator.reproduce [--scale N] [--only PART ...]

One process, one run after the other. AttentionStore's experiment runs with an eighth of its
sessions and of the last tier, the SSD: how many conversations wait over what the tiers hold stays,
and so does the balance of prompts and decoding, because batch, arrivals and GPUs stay. --scale 1
runs it whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.simulator.agents import pauses
from sglang_hc.tools.simulator import workloads
from sglang_hc.tools.simulator.costs import Machine
from sglang_hc.tools.simulator.engine import Serving
from sglang_hc.tools.simulator.models import MODEL_NAMES, load_model
from sglang_hc.tools.simulator.run import Setup, simulate
from sglang_hc.tools.simulator.workloads import attentionstore, l_eval, sharegpt4
from sglang_hc.tools.workloads.reading import Timing, read_trace
from sglang_hc.tools.workloads.sessions import Workload

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
GB = 1e9

Run = tuple[dict[str, Any], Setup]


class Paper:
    """AttentionStore's experiment (section 4.1), with sessions and SSD divided by `scale`. The
    rates are those of the paper; its executor's host work and its read buffer are assumed."""

    def __init__(self, scale: int) -> None:
        self.scale = scale
        self.load = self.closed()

    def closed(self, think: float = 0.0, **options: Any) -> Workload:
        return attentionstore(sessions=9000 // self.scale, think=think, **options)

    def setup(self, model: str, disk: float, *, dram: float = 128.0, **options: Any) -> Setup:
        """disk: GB of the whole experiment. dram, device: GB."""
        options.setdefault("workload", self.load)
        device = options.pop("device", 0.0)
        overflow = options.pop("overflow", "reembed")
        serving = Serving(overflow=overflow, read_buffer=True)
        return Setup(
            model=load_model(model),
            dram=dram * GB,
            disk=disk * GB / self.scale,
            device=device * GB,
            serving=serving,
            **options,
        )

    def recomputing(self, model: str) -> Setup:
        """The paper's RE: nothing is kept, and what is cut is computed again."""
        return self.setup(model, 0, dram=0, policy="none", overflow="recompute")


FITTED_TFLOPS, FITTED_OUTPUT = 26, 64
"""One set of assumptions with which the GPU times come near the paper's: TFLOP/s of one GPU, tokens
that are decoded of an answer at most."""


def fitted(setup: Setup) -> Setup:
    serving = dataclasses.replace(setup.serving, output_cap=FITTED_OUTPUT)
    machine = Machine(flops=FITTED_TFLOPS * 1e12)
    return dataclasses.replace(setup, serving=serving, machine=machine)


def whole(paper: Paper) -> Iterator[Run]:
    """The experiment as it is and an eighth of it, as a server would restore ahead."""
    for scale in (1, paper.scale):
        part = Paper(scale)
        setup = part.setup("llama-13b", 10_000)
        serving = dataclasses.replace(setup.serving, read_buffer=False)
        yield {"sessions": len(part.load.sessions)}, dataclasses.replace(setup, serving=serving)


def times(paper: Paper) -> Iterator[Run]:
    """Figures 14 to 17: `models` against recomputing everything, and both with fitted rates."""
    for name in MODEL_NAMES:
        kept, recomputed = paper.setup(name, 10_000), paper.recomputing(name)
        for case, setup in (("", recomputed), ("fitted", kept), ("fitted", recomputed)):
            label = {"model": name, "arm": setup.policy, "set": case or "published"}
            yield label, fitted(setup) if case else setup


def rounds(paper: Paper) -> Iterator[Run]:
    """Figure 21 with conversations that do not fit: all have several turns, 1,150 tokens each in
    the mean, and are cut at the full window; and the usual ones, whose turns come after 300 s."""
    shape = dataclasses.replace(
        workloads.ATTENTIONSTORE_SHAPE, multi_turn_share=1.0, tokens_per_turn=1150.0
    )
    longer = paper.closed(shape=shape)
    model = load_model("llama-13b", context=5461)
    idle = attentionstore(sessions=1125, rate=0.1, think=300.0)
    for policy in ("queue", "lru", "fifo"):
        for disk in (2_000, 10_000):
            setup = paper.setup("llama-13b", disk, policy=policy, workload=longer)
            yield {"case": "longer", **_arm(policy, disk)}, dataclasses.replace(setup, model=model)
        setup = paper.setup("llama-13b", 300 * paper.scale, dram=64, policy=policy, workload=idle)
        yield {"case": "interactive", **_arm(policy, 300)}, setup


def models(paper: Paper) -> Iterator[Run]:
    """Figure 13: hit rate of four models at 128 GB / 10 TB."""
    for name in MODEL_NAMES:
        yield {"model": name}, paper.setup(name, 10_000)


def policies(paper: Paper) -> Iterator[Run]:
    """Figure 21: eviction policies by disk size, LLaMA-13B."""
    yield _arm("queue, paper's window", 2_000), paper.setup("llama-13b", 2_000, stretch=1.0)
    for policy in ("queue", "belady"):
        yield _arm(policy, 2_000), paper.setup("llama-13b", 2_000, policy=policy)
    for disk in (2_000, 5_000, 10_000):
        for policy in ("lru", "fifo"):
            yield _arm(policy, disk), paper.setup("llama-13b", disk, policy=policy)


def _arm(policy: str, disk: float) -> dict[str, Any]:
    return {"arm": policy, "disk": disk}


def tiers(paper: Paper) -> Iterator[Run]:
    """Figure 24: HBM alone (10 GB), and with DRAM; with SSD it is `models`. Without SSD these are
    the last tier, which is divided."""
    for name in MODEL_NAMES:
        for label, dram in (("hbm", 0), ("hbm+dram", 128)):
            device = 10.0 / paper.scale
            setup = paper.setup(name, 0, dram=dram / paper.scale, device=device)
            yield {"model": name, "tiers": label}, setup


def truncation(paper: Paper) -> Iterator[Run]:
    """Figure 22: what a cut invalidates, prefilled again; and by clients that slide every turn."""
    for name in MODEL_NAMES:
        for overflow in ("recompute", "off"):
            yield {"model": name, "arm": overflow}, paper.setup(name, 10_000, overflow=overflow)


def falcon(paper: Paper) -> Iterator[Run]:
    """The figures again for Falcon-40B with a window of 4K instead of its own 2K."""
    name = "falcon-40b, 4K"
    model = load_model("falcon-40b", context=4096)
    kept, recomputed = paper.setup("falcon-40b", 10_000), paper.recomputing("falcon-40b")
    dram, device = 128 / paper.scale, 10 / paper.scale
    for label, setup in (
        ("models", kept),
        ("published none", recomputed),
        ("fitted queue", fitted(kept)),
        ("fitted none", fitted(recomputed)),
        ("hbm", paper.setup("falcon-40b", 0, dram=0, device=device)),
        ("hbm+dram", paper.setup("falcon-40b", 0, dram=dram, device=device)),
        ("recompute", paper.setup("falcon-40b", 10_000, overflow="recompute")),
        ("off", paper.setup("falcon-40b", 10_000, overflow="off")),
    ):
        yield {"model": name, "tiers": label, "arm": label}, dataclasses.replace(setup, model=model)


def capacity(_: Paper) -> Iterator[Run]:
    """Figure 23: hit rate over RCC / CCpUT, at a load that the GPUs can carry.

    Assumed: 0.115 sessions per second, which keeps the batch short, and exponential pauses between
    the turns of one, of three means; distinct sessions per hour are counted in the load itself.
    """
    model = load_model("llama-13b")
    for pause in (300, 700, 1000):
        load = _thinking(attentionstore(sessions=900, rate=0.115), mean=pause)
        # CCpUT: every session of one time to live at its largest.
        full = _sessions_per_hour(load) * model.context * model.token_bytes
        for ratio in (0.05, 0.1, 0.15, 0.25, 0.5):
            dram = min(128 * GB, ratio * full / 4)
            serving = Serving(overflow="reembed")
            setup = Setup(load, model, dram=dram, disk=ratio * full, serving=serving)
            yield {"ratio": ratio, "pause": pause, "ccput_gb": full / GB}, setup


def _thinking(load: Workload, mean: float) -> Workload:
    """Exponential pauses between the turns of a session."""
    rng = random.Random(0)
    sessions = tuple(
        dataclasses.replace(
            session,
            turns=tuple(
                dataclasses.replace(turn, think=rng.expovariate(1 / mean) if index else 0.0)
                for index, turn in enumerate(session.turns)
            ),
        )
        for session in load.sessions
    )
    return dataclasses.replace(load, sessions=sessions)


def _sessions_per_hour(load: Workload) -> int:
    """Most distinct sessions with a turn in one hour, if every turn were answered at once."""
    turns = []
    for number, session in enumerate(load.sessions):
        at = session.arrival
        for turn in session.turns:
            at += turn.think
            turns.append((at, number))
    turns.sort()
    most, first = 0, 0
    inside: dict[int, int] = {}
    for time_, number in turns:
        inside[number] = inside.get(number, 0) + 1
        while turns[first][0] < time_ - 3600:
            gone = turns[first][1]
            inside[gone] -= 1
            if not inside[gone]:
                del inside[gone]
            first += 1
        most = max(most, len(inside))
    return most


def sensitivity(paper: Paper) -> Iterator[Run]:
    """What the assumptions about ShareGPT and the server do to queue and LRU, LLaMA-13B."""
    base = workloads.ATTENTIONSTORE_SHAPE
    shapes = {
        "prompt share 0.16 (0.3)": dataclasses.replace(base, prompt_share=0.16),
        "sessions 1.5 times longer": dataclasses.replace(base, tokens_per_turn=1300.0),
    }
    variants: dict[str, dict[str, Any]] = {"as assumed": {}}
    for label, shape in shapes.items():
        talks = workloads.conversations(
            shape,
            sessions=9000 // paper.scale,
            rate=1.0,
            think=0.0,
            seed=0,
            name="attentionstore",
            warmup_turns=10_000 // paper.scale,
        )
        variants[label] = {"workload": talks}
    variants["think time 300 s (0)"] = {"workload": paper.closed(think=300.0)}
    mixed = workloads.shuffled(paper.load, 1.0, seed=0)
    variants["turns shuffled, 1 per second"] = {"workload": mixed}
    model = load_model("llama-13b")
    faster = dataclasses.replace(model, host_work=model.host_work._replace(step=0.2e-3))
    for label, options in variants.items():
        for policy in ("queue", "lru"):
            yield (
                {"variant": label, "arm": policy},
                paper.setup("llama-13b", 4_000, policy=policy, **options),
            )
    for policy in ("queue", "lru"):
        setup = paper.setup("llama-13b", 4_000, policy=policy)
        yield (
            {"variant": "0.2 ms of host work per layer of a step (0.85)", "arm": policy},
            dataclasses.replace(setup, model=faster),
        )


def writes(_: Paper) -> Iterator[Run]:
    """`--hc-write`: what is written, and what it costs in hits."""
    model, shape = load_model("llama-13b"), workloads.ATTENTIONSTORE_SHAPE
    shares = {"one turn each": 0.01, "one of five has several": 0.2, "AttentionStore's": 0.73}
    loads = {"sharegpt4": sharegpt4(sessions=600, rate=0.06)}
    loads["l-eval, Zipf 1"] = l_eval(sessions=500, rate=0.4)
    for name, share in shares.items():
        talks = dataclasses.replace(shape, multi_turn_share=share)
        loads[name] = attentionstore(sessions=1125, rate=0.1, think=300.0, shape=talks)
    for name, load in loads.items():
        for rule in ("all", "second-use", "5e12"):
            setup = Setup(load, model, dram=32 * GB, disk=4_000 * GB, write=rule)
            yield {"load": name, "arm": rule}, setup


def bound(_: Paper) -> Iterator[Run]:
    """Workloads against the clairvoyant policy on the same record; attentionstore: `policies`.

    Each with tiers that are scarce, with twice as large ones, and scarce with everything happening
    HURRY times as fast, so that a queue forms.
    """
    samples = HERE / "samples"
    long = load_model("llama-13b", context=16_384)
    chat = sharegpt4(sessions=200, rate=0.06)
    documents = l_eval(sessions=500, rate=0.4)
    cases = {
        "sharegpt4": Setup(chat, long, dram=32 * GB, disk=100 * GB),
        "l-eval, Zipf 1": Setup(documents, long, dram=64 * GB, disk=400 * GB),
        "l-eval, uniform": Setup(
            l_eval(sessions=500, rate=0.4, alpha=0.0), long, dram=64 * GB, disk=400 * GB
        ),
    }
    for name, dram, disk in (
        ("mooncake.jsonl", 20, 100),
        ("bailian.jsonl", 3, 12),
        ("burstgpt.csv", 4, 15),
        ("sharegpt.json", 2, 5),
    ):
        trace = read_trace(samples / name, Timing(rate=2.0, think=20.0))
        cases[name] = Setup(trace, long, dram=dram * GB, disk=disk * GB)
    for label, setup in cases.items():
        double = dataclasses.replace(setup, dram=2 * setup.dram, disk=2 * setup.disk)
        queued = dataclasses.replace(setup, workload=_hurried(setup.workload, HURRY))
        for case, run in (
            (label, setup),
            (f"{label}, double", double),
            (f"{label}, queued", queued),
        ):
            for policy in ("queue", "lru", "belady"):
                yield {"case": case, "arm": policy}, dataclasses.replace(run, policy=policy)


HURRY = 50.0


def _hurried(load: Workload, factor: float) -> Workload:
    """Arrivals and pauses shorter by a factor."""
    sessions = tuple(
        dataclasses.replace(
            session,
            arrival=session.arrival / factor,
            turns=tuple(
                dataclasses.replace(
                    turn,
                    think=turn.think / factor,
                    at=None if turn.at is None else turn.at / factor,
                )
                for turn in session.turns
            ),
        )
        for session in load.sessions
    )
    return dataclasses.replace(load, sessions=sessions)


PARTS: dict[str, Callable[[Paper], Iterator[Run]]] = {
    part.__name__: part
    for part in (
        models,
        whole,
        times,
        policies,
        rounds,
        writes,
        bound,
        capacity,
        tiers,
        sensitivity,
        truncation,
        falcon,
        pauses,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, choices=(1, 2, 4, 8), default=8)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    paper = Paper(args.scale)
    RESULTS.mkdir(exist_ok=True)
    for part in args.only:
        rows = []
        for label, setup in tqdm(list(PARTS[part](paper)), desc=part, unit="run"):
            rows.append({**simulate(setup).as_json(), **label})
        suffix = "" if args.scale == 8 else f"-scale{args.scale}"
        path = RESULTS / f"simulator-{part}{suffix}.json"
        path.write_text(json.dumps(_report(part, paper.scale, rows), indent=1) + "\n")


def _report(part: str, scale: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "part": part,
        "command": f"python -m benchmark.simulator.reproduce --only {part}"
        + ("" if scale == 8 else f" --scale {scale}"),
        "scale": scale,
        "commit": revision.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "runs": rows,
    }


if __name__ == "__main__":
    main()
