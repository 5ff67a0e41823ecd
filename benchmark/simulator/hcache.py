"""HCache's figures 4, 9 to 13 and 15 from the costs of `sglang-hc plan`, beside the paper.

    python -m benchmark.simulator.hcache [--json FILE]

Nothing is measured. ASSUMED says what is taken from where; one number is fitted (HOST_WORK), and
tables that it changes show both. COMMANDS are calls of the plan that give cells of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean

from benchmark.harness.modelled import json_option, publish, table
from benchmark.harness.report import Table
from benchmark.simulator.hcache_model import (
    CONFIGS,
    DOCUMENTS,
    GPU_TOKENS,
    HCACHE,
    HIDDEN,
    HOST_WORK,
    IDEAL,
    KV,
    RE,
    TESTBED,
    THIRTEEN,
    System,
    busy,
    by_formula,
    by_tokens,
    fitted,
    gain,
    mean_first_token,
    mean_of_requests,
    reported,
    requests,
    without_hidden,
)
from sglang_hc.forms import LayerPlan
from sglang_hc.policy.layer_plan import stored_bytes
from sglang_hc.tools.cli.plan import DEFAULT_CONTEXT
from sglang_hc.tools.workloads.l_eval import TASKS, ContextTask

SHORT = 1024
"""Tokens of a history in figures 11 to 13."""

ASSUMED = (
    "FLOPS and transmission speed of Table 2; products and attention run at 0.65 of the FLOPS, on "
    "every card (the balances of section 6.1.3 are 0.63 and 0.69 on an A100)",
    "an SSD brings 6.9 GB/s (section 6.2.2), several their sum, at most the transmission speed",
    "four GPUs are one of four times the rates, with one SSD each; gathering costs nothing",
    "a first token is a restoration, then a prefill (section 5)",
    f"the schedule is the one for {DEFAULT_CONTEXT} tokens; in figures 11 to 13, for the history's",
    f"fitted to figure 4: a layer of a pass takes {1e3 * HOST_WORK:g} ms of host work beside its "
    "weights, in columns that say so",
    "figure 9: rounds with a history, no queue; in its last two columns the device is full, and "
    "nothing runs beside a restoration",
    "ShareGPT4 and L-Eval are the simulator's loads, made from the paper's statistics; the mix of "
    "figures 4 and 10 is their average",
    "figure 11a-c has no length in the text; taken: 1,024 tokens",
    "figure 12 has no settings in the text; taken: 7B with four SSDs, 13B with one, 30B from host "
    "memory",
    f"figure 15: an LRU of {GPU_TOKENS:,} tokens (section 2.4); fitted: {DOCUMENTS} documents, for "
    "15 % of hits without skew",
)

COMMANDS = {
    "11a-c: 7B, A30": "--gpu A30",
    "11a-c: 13B, H800": "--gpu H800",
    "11d-f: one SSD; 13: layers": "--gpu A100-40G --disk-gbps 6.9 --direct",
    "11d-f: four SSDs": "--gpu A100-40G --disk-gbps 27.6 --direct",
}
"""Options of `sglang-hc plan`. For 30B four GPUs with four SSDs are as one with one."""

MIX = ContextTask(16340.2, 44.7, 50.2)
"""Average of L-Eval's 20 sub-tasks (Table 1)."""

GPUS = ("A30", "4090", "A100-40G", "L20", "H800")

SETTINGS = {
    "balanced": TESTBED[0],
    "compute-sufficient": THIRTEEN,
    "IO-sufficient": replace(TESTBED[2], ssds=0),
}
"""Of figure 12."""

TILES = (1, 128, 256)

Seconds = Callable[[System, str], float]
"""Of an arm."""

MODELLED = ("over KV", "over KV, fitted", "over recompute", "over recompute, fitted")


def schedule(plan: LayerPlan) -> str:
    """As Table 3 writes it."""
    counts = ((plan.recompute, "RE"), (plan.hidden, "H"), (plan.kv, "KV"))
    return " + ".join(f"{count} {form}" for count, form in counts if count)


def spread(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[0]:.2f} to {found[-1]:.2f}"


def both(seconds: Seconds, system: System, arm: str, by: str = HCACHE) -> list[float]:
    """An arm's time over another's, without and with the fitted host work."""
    return [seconds(one, arm) / seconds(one, by) for one in (system, fitted(system))]


def first_token(task: ContextTask) -> Seconds:
    return lambda one, arm: one.first_token(arm, round(task.context), round(task.question))


def ranged(
    name: str,
    columns: Sequence[str],
    rows: Sequence[tuple[Sequence[str], Sequence[float]]],
    paper: Sequence[str],
) -> Table:
    """Rows of (names, numbers), behind them our ranges and what the paper says of all rows."""
    blank = [""] * (len(rows[0][0]) - 1)
    cells = [[*names, *(f"{value:.2f}" for value in values)] for names, values in rows]
    ranges = [spread(column) for column in zip(*(values for _, values in rows), strict=True)]
    return table(name, columns, [*cells, ["all", *blank, *ranges], ["paper", *blank, *paper]])


def twice(*said: str) -> list[str]:
    """The paper's cells, without and with the fitted host work."""
    return [one for each in said for one in (each, each)]


def table_3() -> Table:
    paper = {"7B": ("31 H + 1 KV", 24e9, "132, 256"), "13B": ("36 H + 4 KV", 21e9, "210, 400"),
             "30B": ("8 RE + 40 H", 37e9, "280, 672")}  # fmt: skip
    rows = []
    for system in TESTBED:
        said, balance, size = paper[system.model]
        ways, state = reported(system, DEFAULT_CONTEXT).ways, system.shape.state_shape()
        kib = (f"{stored_bytes(ways[arm].plan, state) / 1024:.0f}" for arm in (HCACHE, KV))
        plans = by_formula(system, balance), ways[HCACHE].plan
        rows.append([system.model, said, *map(schedule, plans), size, ", ".join(kib)])
    columns = ("Table 3", "paper", "its formulas and balance", "modelled",
               "KiB a token, HCache and KV: paper", "16 bits")  # fmt: skip
    return table("table-3", columns, rows)


def figure_4() -> Table:
    def over_ideal(system: System, arm: str) -> list[float]:
        return both(first_token(MIX), system, arm, IDEAL)

    rows = [([one.model], [*over_ideal(one, RE), *over_ideal(one, KV)]) for one in TESTBED]
    columns = ("figure 4, over ideal", "recompute", "recompute, fitted", "KV", "KV, fitted")
    return ranged("figure-4", columns, rows, twice("20.0 to 26.0", "6.5 to 13.0"))


def figure_9() -> Table:
    rows = []
    for system in TESTBED:
        gains = [*both(mean_first_token, system, KV), *both(mean_first_token, system, RE)]
        taken = {arm: busy(fitted(system), arm) for arm in (KV, HCACHE, IDEAL)}
        full = [taken[KV] / taken[HCACHE], taken[HCACHE] / taken[IDEAL]]
        rows.append(([system.model], [*gains, *full]))
    columns = ("figure 9", *MODELLED, "rounds a second over KV", "TBT over ideal")
    paper = [*twice("1.27 to 1.90", "2.21 to 3.57"), "up to 1.11", "up to 1.04"]
    return ranged("figure-9", columns, rows, paper)


def figure_10() -> Table:
    rows = []
    for system in TESTBED:
        for name, task in {**TASKS, "mix": MIX}.items():
            seconds = first_token(task)
            gains = [*both(seconds, system, KV), *both(seconds, system, RE)]
            rows.append(([system.model, name], gains))
    columns = ("figure 10", "task", *MODELLED)
    return ranged("figure-10", columns, rows, twice("1.62 to 1.93", "2.66 to 5.73"))


def on_cards() -> list[System]:
    """Figures 11a to c: state in host memory, on cards that have room for the model; 30B also on
    four."""
    single = [System(model, gpu, ssds=0) for model in CONFIGS for gpu in GPUS]
    return [*(one for one in single if one.free > 0), SETTINGS["IO-sufficient"]]


def restored(system: System) -> tuple[str, list[float]]:
    """Schedule for the short history, and gains over KV and recomputation."""
    found = reported(system, SHORT).ways[HCACHE].plan
    return schedule(found), [gain(system, over, SHORT) for over in (KV, RE)]


def figure_11a() -> Table:
    said = {("7B", "A30"): "1.33", ("13B", "A100-40G"): "1.66", ("13B", "H800"): "1.77"}
    rows = []
    for system in on_cards():
        name = f"{system.gpus} x {system.gpu}" if system.gpus > 1 else system.gpu
        plan, gains = restored(system)
        rows.append(([system.model, name, plan, said.get((system.model, name), "")], gains))
    columns = ("figure 11a-c", "GPU", "schedule", "over KV, paper", "over KV", "over recompute")
    return ranged("figure-11a", columns, rows, ["1.33 to 1.81", "5.04 to 9.05"])


def figure_11d() -> Table:
    rows = []
    for one in TESTBED:
        for ssds in range(1, 5):
            plan, gains = restored(replace(one, ssds=ssds))
            rows.append(([one.model, str(ssds), plan], gains))
    columns = ("figure 11d-f", "SSDs a GPU", "schedule", "over KV", "over recompute")
    return ranged("figure-11d", columns, rows, ["1.33 to 2.66", "2.3 to 6.1"])


def figure_11g() -> Table:
    rows = []
    for system in TESTBED:
        for context in (1024, 4096, 16384):
            ways = reported(system, context).ways
            speeds = (f"{context / ways[arm].restore / 1e3:.1f}" for arm in (RE, KV, HCACHE))
            rows.append([system.model, str(context), schedule(ways[HCACHE].plan), *speeds])
    columns = ("figure 11g-i", "tokens", "schedule", "1000 tokens/s: recompute", "KV", "HCache")
    return table("figure-11g", columns, rows)


def figure_12() -> Table:
    rows = []
    for name, system in SETTINGS.items():
        ways = {arm: way.restore for arm, way in reported(system, SHORT).ways.items()}
        others = (without_hidden(system, SHORT), ways[HIDDEN], ways[KV])
        gains = [other / ways[HCACHE] for other in others]
        rows.append(([name], [*gains, ways[HIDDEN] / ways[KV]]))
    columns = ("figure 12: HCache over", "naive hybrid", "hidden only", "KV", "hidden only over KV")
    paper = ["1.28 to 1.42", "skewed: 1.35 to 1.64", "1.45 to 2.66", "IO-sufficient: 1.13"]
    return ranged("figure-12", columns, rows, paper)


def figure_13() -> Table:
    layers = reported(THIRTEEN, SHORT).ways[HCACHE]
    tokens = min(range(1, SHORT), key=lambda hidden: by_tokens(THIRTEEN, SHORT, hidden))
    rows = [["layers", "9 RE + 31 H", schedule(layers.plan), "", *("" for _ in TILES)]]
    for name, paper, said, hidden in (
        ("tokens", 794, "12%", tokens),
        ("tokens, rounded", 768, "7%", 256 * round(tokens / 256)),
    ):
        slower = (1 - layers.restore / by_tokens(THIRTEEN, SHORT, hidden, tile) for tile in TILES)
        plans = (f"{SHORT - one} RE + {one} H" for one in (paper, hidden))
        rows.append([name, *plans, said, *(f"{share:.0%}" for share in slower)])
    columns = ("figure 13", "schedule, paper", "schedule", "slower, paper",
               "without tiles", "tiles of 128 tokens", "tiles of 256")  # fmt: skip
    return table("figure-13", columns, rows)


def figure_15() -> Table:
    paper = {0.0: ("15%", ["", "1.67", ""]), 1.0: ("", ["", "", ""]),
             2.0: ("94%", ["3.76 to 10.03", "1.15", "1.98"])}  # fmt: skip
    system = TESTBED[0]

    def seconds(skew: float) -> Seconds:
        return lambda one, arm: mean_of_requests(one, arm, skew)

    rows = []
    for skew, (hits, (sooner, over_kv, over_re)) in paper.items():
        share = fmean(hit for _, hit in requests(skew))
        falls = spread(
            seconds(0.0)(fitted(system), arm) / seconds(skew)(fitted(system), arm)
            for arm in (HCACHE, RE)
        )
        cells = [f"{value:.2f}" for arm in (KV, RE) for value in both(seconds(skew), system, arm)]
        rows.append(
            [
                f"{skew:g}",
                hits,
                f"{share:.0%}",
                over_kv,
                *cells[:2],
                over_re,
                *cells[2:],
                sooner,
                falls,
            ]
        )
    columns = ("figure 15: skew", "hits, paper", "hits", "over KV, paper", *MODELLED[:2],
               "over recompute, paper", *MODELLED[2:], "sooner than at 0, paper",
               "sooner, fitted")  # fmt: skip
    return table("figure-15", columns, rows)


FIGURES: tuple[Callable[[], Table], ...] = (
    table_3, figure_4, figure_9, figure_10, figure_11a, figure_11d, figure_11g, figure_12,
    figure_13, figure_15,
)  # fmt: skip


def command(options: str) -> str:
    """The plan of a figure."""
    return f"sglang-hc plan --model FOLDER_OR_CONFIG --context {SHORT} --new-tokens 0 {options}"


def main(words: Sequence[str] | None = None) -> int:
    path = json_option(words, __doc__)
    commands = [[figure, f"`{command(options)}`"] for figure, options in COMMANDS.items()]
    tables = [
        table("assumed", ("assumed",), [[one] for one in ASSUMED]),
        table("commands", ("figure", "command"), commands),
        *(figure() for figure in FIGURES),
    ]
    publish("hcache", tables, path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
