"""What restoring costs in quality: perplexity, greedy replies and drift against never evicted.

    python -m benchmark.quality.run [--dtypes float32,bfloat16,float16] [--windows 4] [--out FILE]

A real model (scripts/get_real_model.py) reads real text (benchmark/texts) through the server's own
scheduler, tree, tiers and restorations, float for float as a server runs them. For every window:

1. the model reads HISTORY tokens of a text and replies with REPLY tokens;
2. the text goes on for CONTINUATION tokens, and the log probability of each is taken;
3. the model replies to the history once more, greedily, with GREEDY tokens.

`never evicted` does 2 and 3 with the history on the device. Every form does them after everything
was pushed off the device and came back. `recompute` does them as plain SGLang would: the history is
gone, and its tokens are computed again in one prefill.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmark import ROOT
from benchmark.harness import machine
from benchmark.harness.cases import answer, run_case

MODEL = "smollm2-135m"
TEXTS = ("declaration.txt", "constitution.txt", "devils-dictionary.txt")
FORMS = {"kv": "kv", "hidden": "hidden", "mixed": "recompute:4,hidden:13,kv:13"}
REFERENCE = "never evicted"
HISTORY, REPLY, CONTINUATION, GREEDY = 320, 24, 256, 24


def windows(count: int) -> list[tuple[list[int], list[int]]]:
    """(history, continuation) pairs, taken from the texts in turn, spread over each text."""
    from benchmark.quality.real_text import tokens_of

    size = HISTORY + CONTINUATION
    texts = [tokens_of(MODEL, name) for name in TEXTS]
    chosen = []
    for number in range(count):
        text = texts[number % len(texts)]
        of_this = math.ceil((count - number % len(texts)) / len(texts))
        start = number // len(texts) * (len(text) - size) // max(1, of_this - 1)
        chosen.append((text[start : start + HISTORY], text[start + HISTORY : start + size]))
    return chosen


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of raw values per arm of one engine: log probabilities, replies, drift."""
    from benchmark.harness.core import Core
    from benchmark.quality.real_text import drift, push_out, read_and_reply

    core = Core(
        "--hc-forms", FORMS[case["forms"]], "--dtype", case["dtype"], "--hc-host-size-gb", "0.5",
        "--max-total-tokens", "2048", model=MODEL,
    )  # fmt: skip

    def ask(history: list[int], following: list[int], salt: str) -> tuple[list[float], list[int]]:
        scored = core.score(history + following, len(history) - 1, salt)
        return scored, core.ask(history, GREEDY, salt).tokens

    arms: dict[str, dict[str, Any]] = {}

    def note(arm: str, scored: list[float], reply: list[int], **more: Any) -> None:
        row = arms.setdefault(arm, {"arm": arm, "logprobs": [], "replies": [], "drift": []})
        row["logprobs"] += scored
        row["replies"].append(reply)
        row["drift"] += [more["drift"]] if more else []

    for number, (text, following) in enumerate(windows(case["windows"])):
        salt = f"evicted {number}"
        history = read_and_reply(core, text, REPLY, salt)
        if case["baselines"]:
            kept = read_and_reply(core, text, REPLY, f"kept {number}")
            assert kept == history, "the engine does not repeat itself"
            note(REFERENCE, *ask(history, following, f"kept {number}"))
            note("recompute", *ask(history, following, f"fresh {number}"))
        known = len(history) - 1  # the last token's state is computed again by every request
        before = [rows[:known] for rows in core.kv(history, salt)]
        push_out(core)
        scored = core.score(history + following, known, salt)
        moved = drift(before, [rows[:known] for rows in core.kv(history, salt)])
        push_out(core)
        reply = core.ask(history, GREEDY, salt)
        assert reply.host > 0, "nothing came back"
        note(case["forms"], scored, reply.tokens, drift=moved._asdict())
    return list(arms.values())


def compared(row: dict[str, Any], reference: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The numbers of one arm. Differences of log probability are in nats."""
    pairs = list(zip(row["logprobs"], reference["logprobs"], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    same = [a == b for a, b in zip(row["replies"], reference["replies"], strict=True)]
    moved = row["drift"]
    return {
        "dtype": dtype,
        "arm": row["arm"],
        "tokens": len(pairs),
        "perplexity": math.exp(-sum(row["logprobs"]) / len(pairs)),
        "reference_perplexity": math.exp(-sum(reference["logprobs"]) / len(pairs)),
        "mean_difference": sum(differences) / len(differences),
        "largest_difference": max(differences),
        "replies": len(same),
        "replies_equal": sum(same),
        "worst_drift": max((d["worst"] for d in moved), default=None),
        "mean_drift": max((d["mean"] for d in moved), default=None),
        "outliers": max((d["outliers"] for d in moved), default=None),
    }


def tables(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Perplexity and mean difference by arm (in the README); all that is compared; drift."""
    quality = [
        [
            *(row["dtype"], row["arm"], f"{row['perplexity']:.4f}"),
            f"{row['perplexity'] / row['reference_perplexity'] - 1:+.4%}",
            *(f"{row['mean_difference']:.1e}", f"{row['largest_difference']:.1e}"),
            f"{row['replies_equal']} of {row['replies']}",
        ]
        for row in rows
    ]
    drifts = [
        [
            *(row["dtype"], row["arm"], f"{row['worst_drift']:.1e}"),
            *(f"{row['mean_drift']:.1e}", f"{row['outliers']:.0f}"),
        ]
        for row in rows
        if row["worst_drift"] is not None
    ]
    head = ["dtype", "history", "perplexity", "against never evicted"]
    head += ["mean difference (nats)", "largest", "greedy replies equal"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    short: dict[str, dict[str, str]] = {}
    for row in rows:
        cell = f"{row['perplexity']:.4f}, {row['mean_difference']:.1e}"
        short.setdefault(row["arm"], {})[row["dtype"]] = cell
    return {
        "short": {
            "columns": ["history", *dtypes],
            "rows": [[arm, *(of.get(name, "-") for name in dtypes)] for arm, of in short.items()],
        },
        "quality": {"columns": head, "rows": quality},
        "drift": {
            "columns": [
                *("dtype", "form", "worst / largest value", "mean / mean value"),
                "largest value / mean value",
            ],
            "rows": drifts,
        },
    }


def run(dtypes: list[str], count: int) -> list[dict[str, Any]]:
    """All rows; each engine in a process of its own."""
    rows = []
    for dtype in dtypes:
        reference: dict[str, Any] = {}
        for forms in FORMS:
            case = {"dtype": dtype, "forms": forms, "windows": count, "baselines": not reference}
            for raw in run_case(machine.module(__file__), case):
                reference = reference or raw
                row = compared(raw, reference, dtype)
                rows.append(row)
                print(
                    f"{dtype:9} {row['arm']:13} perplexity {row['perplexity']:.4f}, largest "
                    f"difference {row['largest_difference']:.1e} nats, "
                    f"{row['replies_equal']} of {row['replies']} replies equal",
                    flush=True,
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    if args.windows < 1:
        parser.error(f"--windows {args.windows}: give 1 or more")
    script = [sys.executable, str(ROOT / "scripts" / "get_real_model.py")]
    if subprocess.run([*script, "--output", str(ROOT / "models")], check=False).returncode:
        return 2
    begun = time.monotonic()
    rows = run(args.dtypes.split(","), args.windows)
    if args.out is not None:
        result = {
            **machine.about("quality"),
            "seconds": round(time.monotonic() - begun),
            "model": MODEL,
            "settings": {
                **{"history": HISTORY, "reply": REPLY, "continuation": CONTINUATION},
                **{"greedy": GREEDY, "windows": args.windows, "plans": FORMS},
            },
            "rows": rows,
            "tables": tables(rows),
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
