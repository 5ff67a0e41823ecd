"""Puts tables made from committed results into the Markdown files that publish them.

    python benchmark/make_tables.py           # rewrite every table
    python benchmark/make_tables.py --check   # exit 1; name stale tables, broken links, others

A table stands between two comments; FILE is in benchmark/results, NAME one of the names below:

    <!-- table: FILE NAME -->
    <!-- /table -->

`<!-- table: FILE NAME: COLUMN, COLUMN -->` shows only these columns.

Results of `python -m benchmark` have: about (machine, commit, command), overview (one row for
every arm of a chat), short (the same as a sentence), screen (the same as the demo prints it),
groups (TTFT by turn or label), summary, ratios, costs (the ratios as a sentence), agreement,
disagreements, gain, losses, varied; those of `cliff` cliff and cliff-short. Results of
benchmark/hooks have hooks and hooks-queue, those of compare_fio fio, those of throttled.py sources.
Other result files bring their own tables, beside about:
{"tables": {NAME: {"columns": [...], "rows": [[...], ...]}}}.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmark import ROOT
from benchmark.harness import cliff_report, report, screen

_MARK = re.compile(
    r"(<!-- table: (?P<file>\S+) (?P<name>[^\s:]+)(?:: (?P<columns>[^\n]+))? -->\n)"
    r"(?P<body>.*?)(<!-- /table -->)",
    re.DOTALL,
)


class TableError(ValueError):
    """A mark that asks for something that is not there. The message names both."""


def _about(result: dict[str, Any]) -> str:
    """Day, machine, commit and command; the result has the versions."""
    where = result["machine"]
    gpus = ", ".join(where["gpus"]) or "no GPU"
    return (
        f"{result['created'][:10]}, {where['cpu']}, {where['cores']} cores, {gpus}, "
        f"commit {where['commit']}: `{result['command']}`"
    )


def _bullets(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _of(table: Callable[[dict[str, Any]], report.Table]) -> Callable[[dict[str, Any]], str]:
    return lambda result: table(result).markdown()


def _costs(result: dict[str, Any]) -> str:
    """Ratios over all requests as one sentence: the range of medians by point and arm."""
    head = {"median_ttft": "TTFT", "median_tbt": "TBT", "output_token_throughput": "throughput"}
    said = []
    for metric, name in head.items():
        ratios = [r for r in result["ratios"] if r["group"] == "all" and r["metric"] == metric]
        medians = [ratio["median"] for ratio in ratios]
        even = sum(ratio["low"] <= 1 <= ratio["high"] for ratio in ratios)
        said.append(
            f"{name} {min(medians):.2f} to {max(medians):.2f} ({even} of {len(ratios)} ranges "
            "include 1)"
        )
    return (
        f"Times better by load and arm, medians, against {result['reference']}: {', '.join(said)}."
    )


def _short(result: dict[str, Any]) -> str:
    """The overview of a chat as one sentence."""
    (_, stock, _, wait, *_), *others = report.overview_table(result).rows
    said = [f"{arm} {ttft} ({gain} times better)" for _, arm, _, ttft, gain, *_ in others]
    return f"Median TTFT of later turns: {stock} {wait}, {', '.join(said)}."


def _microseconds(timed: dict[str, float]) -> str:
    return f"{timed['median_us']:.0f}"


def _hooks(result: dict[str, Any]) -> str:
    """Medians of what the hooks cost, at an old commit too, beside stock SGLang where that does the
    same."""
    old = result["old_commit"]
    rows: list[tuple[str, ...]] = [
        (f"pass with nothing to do, {requests}", _microseconds(timed), "", _microseconds(before))
        for (requests, timed), before in zip(
            result["idle"].items(), old["idle"].values(), strict=True
        )
    ]
    for what in ("match", "evict"):
        rows += [
            (f"{what}: {case['case']}", *map(_microseconds, (case["ours"], case["stock"], before)))
            for case, before in zip(
                result[what]["cases"],
                (before["ours"] for before in old[what]["cases"]),
                strict=True,
            )
        ]
    columns = ("cost", "us", "us of stock", f"us at {old['machine']['commit'][:7]}")
    return report.Table("hooks", columns, tuple(rows)).markdown()


def _hooks_queue(result: dict[str, Any]) -> str:
    """Medians of a pass over a waiting queue, in us, and at an old commit."""
    kinds = ("nothing new", "one admitted, one new", "and its blocks fetched")
    rows = []
    passes = zip(result["queue"]["passes"], result["old_commit"]["queue"]["passes"], strict=True)
    for one, old in passes:
        where = "with a disk" if one["disk"] else "host memory only"
        schedule = ", ready-first" if one["schedule"] == "ready-first" else ""
        cells = (
            f"{_microseconds(one[kind])}, {_microseconds(old[kind])}" if kind in one else ""
            for kind in kinds
        )
        rows.append((where + schedule, *cells))
    return report.Table("hooks-queue", ("tiers", *kinds), tuple(rows)).markdown()


def _fio(result: dict[str, Any]) -> str:
    """MB/s of the store, of the store at an old commit where that ran too, and of fio; medians."""

    def rates(row: dict[str, Any], old: dict[str, Any] | None) -> str:
        measured = [row["store_mb_s"], row["fio_mb_s"]]
        if old is not None:
            measured.insert(1, old["store_mb_s"])
        return ", ".join(f"{median(values):.0f}" for values in measured)

    rows = result["throughput"]
    in_sizes = "block_kib" in rows[0]
    before = result["old_commit"]["throughput"] if "old_commit" in result else [None] * len(rows)
    cells: dict[str, dict[str, str]] = {}
    for row, old in zip(rows, before, strict=True):
        depth = f"{row['block_kib']} KiB" if in_sizes else row["depth_per_directory"]
        place = f"{row['directories']} x {depth}"
        cells.setdefault(place, {})[row["workload"]] = rates(row, old)
    kinds = tuple(next(iter(cells.values())))
    lines = tuple((place, *(found[kind] for kind in kinds)) for place, found in cells.items())
    head = f"directories x {'block' if in_sizes else 'requests'}"
    return report.Table("fio", (head, *kinds), lines).markdown()


def _sources(result: dict[str, Any]) -> str:
    """Medians of restorations from sources of several rates, in ms, by arm."""
    arms = tuple(next(iter(result["sources"].values()))["seconds"])
    rows = tuple(
        (source, found["layer_plan"], *(f"{1e3 * found['seconds'][arm]:.0f}" for arm in arms))
        for source, found in result["sources"].items()
    )
    return report.Table("sources", ("source", "layer plan", *arms), rows).markdown()


OF_A_CHAT: dict[str, Callable[[dict[str, Any]], str]] = {
    "overview": _of(report.overview_table),
    "short": _short,
    "screen": _of(screen.table),
    "groups": _of(report.group_table),
    "summary": _of(report.summary_table),
    "ratios": _of(report.ratio_table),
    "costs": _costs,
    "agreement": _of(report.agreement_table),
    "disagreements": _of(report.disagreement_table),
    "gain": _of(report.gain_table),
    "cliff": _of(cliff_report.table),
    "cliff-short": cliff_report.sentence,
    "losses": lambda result: _bullets(report.loss_lines(result)),
    "varied": lambda result: _bullets(report.varied_lines(result)),
}
"""What is made of the runs of `python -m benchmark`."""

RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "about": _about,
    "hooks": _hooks,
    "hooks-queue": _hooks_queue,
    "fio": _fio,
    "sources": _sources,
    **OF_A_CHAT,
}


def render(result: dict[str, Any], name: str) -> str:
    """Markdown of one table of a result. Raises TableError for a name it does not have."""
    own = result.get("tables", {})
    if name in own:
        columns, rows = own[name]["columns"], own[name]["rows"]
        text = tuple(tuple(str(cell) for cell in row) for row in rows)
        return report.Table(name, tuple(columns), text).markdown()
    if name not in RENDERERS or (name in OF_A_CHAT and "runs" not in result):
        raise TableError(f"no table {name!r}; it has {', '.join(own) or ', '.join(RENDERERS)}")
    return RENDERERS[name](result)


def only(body: str, columns: Sequence[str]) -> str:
    """A Markdown table with these columns, in this order. Raises TableError."""
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()
    )
    if not set(columns) <= set(head):
        raise TableError(f"columns {', '.join(columns)} are not among {', '.join(head)}")
    places = [head.index(column) for column in columns]
    text = tuple(tuple(row[place] for place in places) for row in rows)
    return report.Table("", tuple(columns), text).markdown()


def updated(text: str, results: Path) -> str:
    """The Markdown text with all its tables rewritten. Raises TableError."""

    def fill(match: re.Match[str]) -> str:
        path = results / match["file"]
        try:
            body = render(json.loads(path.read_text()), match["name"])
            if match["columns"]:
                body = only(body, match["columns"].split(", "))
        except (OSError, ValueError, KeyError) as error:
            raise TableError(f"{path.name} {match['name']}: {error}") from error
        return f"{match[1]}\n{body}\n\n<!-- /table -->"

    return _MARK.sub(fill, text)


def pages(root: Path) -> list[Path]:
    """Markdown files that may hold tables."""
    folders = ("docs", "benchmark", "deploy", "sgl-kernel-ext")
    return sorted([*root.glob("*.md"), *(p for f in folders for p in (root / f).glob("**/*.md"))])


_LINK = re.compile(r"\]\((?!https?:)(?P<file>[^)#\s]*)#?(?P<anchor>[^)\s]*)\)")

_PATH = re.compile(r"`([\w./-]+/[\w-]+\.(?:py|json|md))`")


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page, or of a folder's."""
    page = page / "README.md" if page.is_dir() else page
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def broken_links(root: Path) -> list[str]:
    """Links between pages, and paths of our files, that lead nowhere."""
    found = []
    for page in pages(root):
        text, name = page.read_text(encoding="utf-8"), page.relative_to(root)
        for link in _LINK.finditer(text):
            target = (page.parent / link["file"]) if link["file"] else page
            if not target.exists() or (link["anchor"] and link["anchor"] not in _anchors(target)):
                found.append(f"{name}: {link[0][1:]} leads nowhere")
        found += [
            f"{name}: there is no {path}"
            for path in _PATH.findall(text)
            if not any((b / path).exists() for b in (root, root / "python/sglang_hc", page.parent))
        ]
    return found


TESTED = {
    "| flag | default | meaning |": "test/test_flags_page.py",
    "| command | options |": "test/test_flags_page.py",
    "| HiCache | here | what differs |": "test/srt/arguments/test_models_page.py",
    "| model | 40 GB | 80 GB | 141 GB |": "test/srt/model/test_capture_memory.py",
    "| kind | architectures | hidden states | KV | recomputed layers | test |":
        "test/srt/arguments/test_models_table.py",
    "| about | levels | counts |": "test/test_metrics.py",
    "| model | full layers | bytes/token of these | plain bytes/token | MiB of an end "
    "| bytes/token with the end | of plain |": "test/tools/test_model_ends.py",
    "| hooked function | what would replace it |": "test/srt/engine/test_in_place.py",
}  # fmt: skip
"""Heads of tables that are written by hand, and the test that compares each with the code."""

IN_WORDS = {
    "| SGLang | result |",
    "| `medium` of `BlockStored` and `BlockRemoved` | what it is |",
    "| call | what it does | kernel |",
    "| claim | state |",
    "| family (`sglang:`) | here |",
    "| field | retains |",
    "| file | what it is | how it is tested |",
    "| route | body | answer |",
    "| server has | who may |",
    "| what | how |",
    "| where | what | who can read it |",
    "| work | SGLang's kernel | what it lacks here |",
}
"""Heads of tables that say nothing that is counted or measured."""

_MADE = re.compile(r"<!-- table: .*?<!-- (?:/table|end) -->", re.DOTALL)
_HEAD = re.compile(r"^(\|.+\|)\n\|[ :|-]+\|$", re.MULTILINE)


def unchecked_tables(root: Path) -> list[str]:
    """Tables that nobody makes and no test reads."""
    found = []
    for page in pages(root):
        by_hand = _HEAD.findall(_MADE.sub("", page.read_text(encoding="utf-8")))
        for head in (head for head in by_hand if head not in IN_WORDS):
            test = root / TESTED.get(head, "-")
            if not test.is_file() or page.name not in test.read_text(encoding="utf-8"):
                found.append(f"{page.relative_to(root)}: nothing checks {head}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="tree to work on")
    args = parser.parse_args(argv)
    stale = []
    for path in pages(args.root):
        before = path.read_text(encoding="utf-8")
        try:
            after = updated(before, args.root / "benchmark" / "results")
        except TableError as error:
            print(f"{path.relative_to(args.root)}: {error}", file=sys.stderr)
            return 1
        if after != before:
            stale.append(str(path.relative_to(args.root)))
            if not args.check:
                path.write_text(after, encoding="utf-8")
    broken = [*broken_links(args.root), *unchecked_tables(args.root)] if args.check else []
    print(*broken, sep="\n", end="\n" if broken else "")
    if args.check and stale:
        print(f"stale tables in {', '.join(stale)}; run python benchmark/make_tables.py")
    if args.check and (stale or broken):
        return 1
    print(f"{'would change' if args.check else 'rewrote'}: {', '.join(stale) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
