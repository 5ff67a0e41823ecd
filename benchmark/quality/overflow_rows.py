"""What the cells of overflow_table.py say: comparisons, tables and a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmark.harness import cells

DTYPES = ("float32", "bfloat16")
FORMS = {"kv": "kv", "hidden": "hidden", "mixed": "recompute:4,hidden:13,kv:13"}
SMALL = {"heads": "kv", "heads-hidden": "hidden", "heads-mixed": "mixed"}
"""In place of a form: the smaller heads, in this form."""

NO_TT, TT_FORM = "mixed", "hidden"
"""TT is an ordinary prompt, computed alike in every form (the same bits in all committed cells that
have several), so with the smaller heads the one takes that of the other."""

WINDOWS = (512, 1024, 2048)
HEADS = (0, 4, 64)
DEFAULT_HEAD = 64
KINDS = ("prose", "reference")
"""Kinds of text that "all" stands for."""

BOOK = "book"
"""A third kind on its own, prose too. In place of a form: this text, in KV form."""


def form_of(name: str) -> str:
    """The form that a name in place of one stands for."""
    return "kv" if name == BOOK else SMALL.get(name, name)


CHUNK = 64
"""Tokens whose log probabilities are added up in a cell."""

BEHIND = ((0, 64), (64, 128), (128, 256), (256, 512), (512, 1024))
"""Tokens behind the cut, between which moved state is compared on its own."""


class Compared(NamedTuple):
    """Two arms over the same tokens. perplexity, reference: of the one and the other. change:
    relative change of perplexity. error: standard error of it, over the samples."""

    tokens: int
    perplexity: float
    reference: float
    change: float
    error: float


def compared(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Compared:
    """pairs: for each sample the chunks of an arm and of its reference; the common ones count."""
    arm, reference, differences, tokens = 0.0, 0.0, [], 0
    for some, other in pairs:
        count = min(len(some), len(other))
        a, b = sum(some[:count]), sum(other[:count])
        arm, reference, tokens = arm + a, reference + b, tokens + count * CHUNK
        differences.append((a - b) / (count * CHUNK))
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    change = math.exp((arm - reference) / tokens) - 1
    return Compared(
        tokens,
        math.exp(arm / tokens),
        math.exp(reference / tokens),
        change,
        (1 + change) * spread / math.sqrt(len(differences)),
    )


def rows_of(measured: dict[str, cells.Cell]) -> list[dict[str, Any]]:
    """One row per type, window, form, arm, kind of text ("all": those of KINDS) and part of the
    text behind the cut (`behind`: its first and last token, None for all): against TT with the same
    head, in its own form or in TT_FORM, or with the default head where that was not measured."""
    found = {key: cell["values"] for key, cell in measured.items() if cell["status"] == cells.OK}
    arms = _by_arm(found)
    kinds = {int(key.split()[-1]): values["kind"] for key, values in found.items()}
    rows = []
    for (dtype, window, form, arm), mine in sorted(arms.items()):
        same, default = f"TT {arm.split()[-1]}", f"TT {DEFAULT_HEAD}"
        near = ((form, same), (TT_FORM, same), (form, default))
        places = ((dtype, window, *place) for place in near)
        place = next((place for place in places if place in arms), None)
        if place is None or place[-1] == arm:
            continue
        against, reference = place[-1], arms[place]
        parts = BEHIND if arm == f"ours {DEFAULT_HEAD}" and form == "kv" else ()
        for kind in ("all", *KINDS, BOOK):
            chosen = KINDS if kind == "all" else (kind,)
            for part in (None, *parts):
                first, last = part or (0, window)
                pairs = [
                    (mine[n][first // CHUNK : last // CHUNK], other[first // CHUNK : last // CHUNK])
                    for n, other in reference.items()
                    if n in mine and kinds[n] in chosen
                ]
                pairs = [pair for pair in pairs if all(pair)]
                if pairs:
                    row = {"dtype": dtype, "window": window, "form": form, "arm": arm}
                    row |= {"kind": kind, "behind": part and list(part)}
                    row |= {"cuts": len(pairs), "against": against, **compared(pairs)._asdict()}
                    rows.append(cells.rounded(row))
    return rows


Arm = tuple[str, int, str, str]
"""Type, window, form, name."""


def _by_arm(found: dict[str, dict[str, Any]]) -> dict[Arm, dict[int, list[float]]]:
    """By number of the sample: the chunks of the arm."""
    arms: dict[Arm, dict[int, list[float]]] = {}
    for key, values in found.items():
        dtype, form, window, number = key.split()
        form = form_of(form)
        for arm, chunks in values["arms"].items():
            arms.setdefault((dtype, int(window), form, arm), {})[int(number)] = chunks
    return arms


def merged(older: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and those of an earlier result whose comparison they lack or have over fewer
    tokens."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("dtype", "window", "form", "arm", "kind")
        return (*(row[name] for name in names), str(row.get("behind")))

    chosen = {place(row): row for row in older}
    for row in rows:
        known = chosen.get(place(row))
        if known is None or known["tokens"] <= row["tokens"]:
            chosen[place(row)] = row
    return [chosen[key] for key in sorted(chosen)]


def tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The tables of the README. Each comparison is over the tokens that both arms scored."""
    return {"after-a-cut": _by_head(rows), "by-text": _by_text(rows), "behind": _behind(rows)}


PLACES: list[dict[str, Any]] = [
    {"dtype": dtype, "window": window} for dtype in DTYPES for window in WINDOWS
]


def _find(
    rows: list[dict[str, Any]], behind: list[int] | None = None, **wanted: Any
) -> dict[str, Any] | None:
    fits = (row for row in rows if row.items() >= wanted.items())
    return next((row for row in fits if row.get("behind") == behind), None)


def _by_head(rows: list[dict[str, Any]]) -> dict[str, Any]:
    lines = []
    for place in PLACES:
        for head in HEADS:
            wanted = {**place, "arm": f"ours {head}", "kind": "all"}
            of = [_find(rows, **wanted, form=form) for form in FORMS]
            kv = of[0]
            if kv is None:
                continue
            perplexities = [f"{kv['reference']:.2f}", f"{kv['perplexity']:.2f}"]
            nkvt = _find(rows, **place, form="kv", arm=f"NKVT {head}", kind="all")
            changes = [_change(row, kv["cuts"]) for row in of]
            start = [*map(str, place.values()), str(head), str(kv["cuts"]), kv["against"]]
            lines.append([*start, *perplexities, *changes, _factor(nkvt)])
    start = ["dtype", "window", "head", "cuts", "TT with head", "TT", "ours (kv)"]
    return {"columns": [*start, *(f"{form} against TT" for form in FORMS), "NKVT"], "rows": lines}


def _by_text(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The default head in KV form, by kind of text."""
    lines = []
    for place in PLACES:
        wanted = {**place, "form": "kv", "arm": f"ours {DEFAULT_HEAD}"}
        every = _find(rows, **wanted, kind="all")
        if every is not None:
            of = [_find(rows, **wanted, kind=kind) for kind in (*KINDS, BOOK)]
            start = [*map(str, place.values()), str(every["tokens"] // every["cuts"])]
            lines.append([*start, *(_change(row, every["cuts"] // len(KINDS)) for row in of)])
    return {"columns": ["dtype", "window", "tokens of a cut", *KINDS, BOOK], "rows": lines}


def _behind(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The same by the distance behind the cut."""
    lines = []
    for place in PLACES:
        for kind in ("all", *KINDS, BOOK):
            wanted = {**place, "form": "kv", "arm": f"ours {DEFAULT_HEAD}", "kind": kind}
            kv = _find(rows, **wanted)
            if kv is not None:
                parts = [_find(rows, list(part), **wanted) for part in BEHIND]
                start = [*map(str, place.values()), kind, str(kv["cuts"]), str(kv["tokens"])]
                lines.append([*start, *(_change(row, kv["cuts"]) for row in (kv, *parts))])
    columns = ["dtype", "window", "text", "cuts", "tokens", "all tokens"]
    columns += [f"tokens {first + 1}-{last}" for first, last in BEHIND]
    return {"columns": columns, "rows": lines}


def _change(row: dict[str, Any] | None, cuts: int) -> str:
    """cuts: what the row of the table is over; another number is named."""
    if row is None:
        return "-"
    other = "" if row["cuts"] == cuts else f" ({row['cuts']} cuts)"
    return f"{row['change']:+.2%} ± {row['error']:.2%}{other}"


def _factor(row: dict[str, Any] | None) -> str:
    return f"x{1 + row['change']:.2f}" if row else "-"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Perplexity over that of TT by window, one panel per type, logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    figure, panels = pyplot.subplots(
        1, len(dtypes), figsize=(4.2 * len(dtypes), 3.4), sharey=True, squeeze=False
    )
    arms = {
        "not cut": "whole", "ours, head of 64": "ours 64", "ours, head of 4": "ours 4",
        "ours, no head": "ours 0", "NKVT": "NKVT 64",
    }  # fmt: skip
    for axes, dtype in zip(panels[0], dtypes, strict=True):
        for place, (label, arm) in enumerate(arms.items()):
            known = {
                row["window"]: 1 + row["change"]
                for row in rows
                if (row["dtype"], row["arm"], row["form"], row["kind"]) == (dtype, arm, "kv", "all")
                and row.get("behind") is None
            }
            places = [WINDOWS.index(window) + (place - 2) * 0.16 for window in known]
            axes.bar(places, list(known.values()), width=0.15, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log")
        axes.set_xticks(range(len(WINDOWS)), [str(window) for window in WINDOWS])
        axes.set_xlabel("window (tokens)")
        axes.set_title(dtype)
    panels[0][0].legend(fontsize=7)
    panels[0][0].set_ylabel("perplexity after a cut over TT")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
