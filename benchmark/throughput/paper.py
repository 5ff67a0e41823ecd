"""HybridServe's figures 12, 13 and 15 from the model of a pass, beside what the paper says.

    python -m benchmark.throughput.paper [--json FILE]

Nothing is measured: `sglang_hc.policy.streamed_pass` says what each pass takes. Two numbers are
fitted to the three averages of section 5.2 (see ASSUMED); everything else follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean
from typing import Any

from scipy.optimize import minimize_scalar

from benchmark.harness.modelled import json_option, publish, table
from benchmark.harness.report import Table
from sglang_hc.policy.hybrid import Allocation, allocate, best_split, device_room
from sglang_hc.policy.streamed_pass import Load, Split, StreamedModel
from sglang_hc.tools.datasheet import Rates, Stored, load_hardware, streamed_model
from sglang_hc.tools.model_shape import ModelShape

FLOP_SHARE = 0.35
FLEXGEN_LINK_SHARE = 0.57
LINK = 25e9
HOST = 882e9
ROUNDS = 8
OUTPUT = 128
PROMPTS = (128, 256, 512, 1024, 1920)

ASSUMED = (
    f"fitted: products run at {FLOP_SHARE} of the data sheet's 330 TFLOP/s, which is "
    f"{2 * FLOP_SHARE:g} of the rate with 32-bit accumulation",
    f"fitted: FlexGen fills {FLEXGEN_LINK_SHARE} of the link, HybridServe all of it",
    f"the link (PCIe 4.0 x16) brings {LINK / 1e9:g} GB/s; the other direction costs nothing",
    f"figure 12 has prompts of {', '.join(map(str, PROMPTS))} tokens (the text has no axis); "
    "averages are geometric",
    "figure 13 is of OPT-30B (the text does not say)",
    f"{ROUNDS} mini-batches; a tenth of the device and the embeddings are not for layers and state",
    "FlexGen keeps as many layers on the device as have room; HybridServe keeps none, and fills "
    "the room with hidden states",
    "`hybrid` keeps the ratio that is best for its whole run; `algorithm 1` that of the paper's, "
    f"for {HOST / 1e9:g} GB",
    "copies run ahead in every system; a prompt's pass takes its compute or the weights",
)

OPT = {"6.7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56), "66B": (64, 9216, 72)}
"""Layers, hidden size and heads of the paper's models."""


def opt_config(size: str) -> dict[str, Any]:
    """The config.json of a model of the paper, as far as it is read."""
    layers, hidden, heads = OPT[size]
    return {
        "model_type": "opt",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "torch_dtype": "float16",
    }


@cache
def paper_model(size: str) -> StreamedModel:
    """A model on the machine of section 5.1: RTX 4090, 882 GB of host memory."""
    gpu = load_hardware("4090")
    rates = Rates(gpu.fp16_tflops.value * 1e12 * FLOP_SHARE, gpu.memory_bandwidth, LINK, None)
    shape = ModelShape.from_config(opt_config(size))
    return streamed_model(rates, shape, HOST, gpu.memory_gb.value * 1e9, Stored())


@dataclass(frozen=True)
class Run:
    """One batch of requests of the paper, answered together."""

    size: str
    prompt: int
    batch: int = 128

    @property
    def model(self) -> StreamedModel:
        return paper_model(self.size)

    @property
    def passes(self) -> Iterator[Load]:
        """The passes of the generation."""
        for done in range(1, OUTPUT):
            yield self.load(self.prompt + done)

    @property
    def act_gpu(self) -> float:
        """Tokens whose hidden states have room on the device to the end."""
        return max(0.0, device_room(self.model, self.batch * (self.prompt + OUTPUT), ROUNDS))

    def load(self, context: float) -> Load:
        return Load(self.batch, self.batch * context, self.batch)

    def prefill_seconds(self) -> float:
        new = self.batch * self.prompt
        load = Load(self.batch, 0.0, new, new * self.prompt / 2)
        return self.model.times(load, Split()).ahead


Splits = Callable[[Run, Load], Split]
"""Where a system has the state of a pass of a run."""


def flexgen(run: Run, load: Load) -> Split:
    """K and V in host memory, weights on the device as far as there is room at the end."""
    split = best_split(run.model, run.load(run.prompt + OUTPUT), ROUNDS, act=0.0)
    if split is None:
        raise ValueError(f"{run} does not fit")
    return Split(host_kv=load.tokens, resident=split.resident)


def _kept(run: Run, load: Load, act: float) -> Split:
    """`act` tokens as hidden states, on the device as far as there is room."""
    device = min(act, run.act_gpu)
    return Split(load.tokens - act, act - device, device)


def act_only(run: Run, load: Load) -> Split:
    return _kept(run, load, load.tokens)


def halves(run: Run, load: Load) -> Split:
    """Host memory divided 1:1 (section 5.5)."""
    device = min(load.tokens, run.act_gpu)
    return _kept(run, load, device + (load.tokens - device) / 2)


def algorithm_1(run: Run, load: Load) -> Split:
    split = allocate(run.model, run.act_gpu).split(load.tokens)
    return _kept(run, load, split.act)


def hybrid(run: Run, load: Load) -> Split:
    return _kept(run, load, load.tokens * _best_share(run))


@cache
def _best_share(run: Run) -> float:
    """Share of hidden states with which the generation is shortest. Its time is convex in it."""

    def seconds(share: float) -> float:
        splits = ((load, _kept(run, load, share * load.tokens)) for load in run.passes)
        return sum(run.model.times(load, split, ROUNDS).ahead for load, split in splits)

    return float(minimize_scalar(seconds, bounds=(0, 1), method="bounded").x)


FLEXGEN, FILLED = "flexgen", "flexgen, whole link"

SYSTEMS: dict[str, Splits] = {
    FLEXGEN: flexgen,
    FILLED: flexgen,
    "act": act_only,
    "halves": halves,
    "algorithm 1": algorithm_1,
    "hybrid": hybrid,
}


@cache
def throughput(system: str, run: Run) -> float:
    """Generated tokens a second, prefill included (section 5.2)."""
    seconds = run.prefill_seconds()
    for load in run.passes:
        times = run.model.times(load, SYSTEMS[system](run, load), ROUNDS)
        if system == FLEXGEN:
            times = times._replace(link=times.link / FLEXGEN_LINK_SHARE)
        seconds += times.ahead
    return run.batch * OUTPUT / seconds


def gain(system: str, over: str, sizes: Sequence[str] = tuple(OPT)) -> float:
    """Mean of throughput over another system's, over models and prompts."""
    runs = [Run(size, prompt) for size in sizes for prompt in PROMPTS]
    return geometric_mean(throughput(system, run) / throughput(over, run) for run in runs)


def traffic(system: str, run: Run) -> float:
    """Bytes from host memory to the device in the generation."""
    splits = ((load, SYSTEMS[system](run, load)) for load in run.passes)
    return sum(LINK * run.model.times(load, split, ROUNDS).link for load, split in splits)


def ratio(allocation: Allocation) -> float:
    """Tokens as K and V for each one as hidden states, in host memory."""
    return allocation.kv_host / allocation.act_host


def figure_12() -> Table:
    rows = [
        [
            f"OPT-{size}",
            str(prompt),
            *(f"{throughput(system, Run(size, prompt)):.1f}" for system in SYSTEMS),
        ]
        for size in OPT
        for prompt in PROMPTS
    ]
    return table("figure-12", ("model", "prompt", *(f"{one}, tokens/s" for one in SYSTEMS)), rows)


def averages() -> Table:
    """The averages that the paper states, and ours."""
    said = [
        ("hybrid over FlexGen", "2.19", gain("hybrid", FLEXGEN)),
        ("ACT over FlexGen", "1.61", gain("act", FLEXGEN)),
        ("hybrid over ACT", "1.35", gain("hybrid", "act")),
        ("hybrid over FlexGen, OPT-6.7B", "2.05", gain("hybrid", FLEXGEN, ["6.7B"])),
        ("hybrid over FlexGen, OPT-66B", "2.33", gain("hybrid", FLEXGEN, ["66B"])),
        ("algorithm 1 over FlexGen", "2.19", gain("algorithm 1", FLEXGEN)),
        ("hybrid over a FlexGen that fills the link", "", gain("hybrid", FILLED)),
    ]
    return table(
        "figure-12-averages",
        ("figure 12", "paper", "modelled"),
        [[name, paper, f"{found:.2f}"] for name, paper, found in said],
    )


def figure_13() -> Table:
    rows = []
    for batch, said in ((32, "1.27"), (64, "1.38")):
        found = [reduction(batch, prompt) for prompt in PROMPTS]
        rows.append(
            [str(batch), said, f"{max(found):.2f}", ", ".join(f"{each:.2f}" for each in found)]
        )
    columns = ("figure 13: batch", "paper, up to", "modelled, up to", "modelled, by prompt")
    return table("figure-13", columns, rows)


def reduction(batch: int, prompt: int) -> float:
    """FlexGen's traffic over HybridServe's."""
    run = Run("30B", prompt, batch)
    return traffic("flexgen", run) / traffic("hybrid", run)


def figure_15() -> Table:
    paper = {"6.7B": ("1.23", "", "about 1"), "13B": ("", "", "about 1"),
             "30B": ("", "1.6", "2"), "66B": ("1.39", "1.56", "1.78")}  # fmt: skip
    rows = []
    for size, (half, policies, said) in paper.items():
        found = ratio(allocate(paper_model(size), Run(size, PROMPTS[-1]).act_gpu))
        rows.append(
            [
                f"OPT-{size}",
                half,
                f"{gain('halves', 'act', [size]):.2f}",
                policies,
                f"{gain('algorithm 1', 'act', [size]):.2f}",
                f"{gain('hybrid', 'act', [size]):.2f}",
                said,
                f"{found:.2f}",
            ]
        )
    means = [f"{gain(system, 'act'):.2f}" for system in ("halves", "algorithm 1", "hybrid")]
    rows.append(["all", "1.33", means[0], "", *means[1:], "", ""])
    columns = (
        "figure 15, over ACT", "1:1, paper", "1:1", "policies, paper", "algorithm 1", "best share",
        "KV for each ACT, paper", "KV for each ACT, algorithm 1",
    )  # fmt: skip
    return table("figure-15", columns, rows)


def main(words: Sequence[str] | None = None) -> int:
    path = json_option(words, __doc__)
    assumed = table("assumed", ("assumed",), [[one] for one in ASSUMED])
    tables = [assumed, averages(), figure_12(), figure_13(), figure_15()]
    publish("throughput", tables, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
