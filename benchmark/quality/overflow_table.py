"""AttentionStore's Table 1 with the server's own code: perplexity of what follows a cut.

    python -m benchmark.quality.overflow_table [--quick] [--cells FILE] [--out FILE] [--plot FILE]

A real model (scripts/get_real_model.py) reads a text as one conversation. Where it has filled a
window, the half behind the head is dropped, and the log probabilities of the tokens with which the
text goes on are taken:

TT      the kept tokens are prefilled in their new places (recomputed truncation)
ours    their state moves there: `--hc-overflow reembed` (AttentionStore section 3.4)
NKVT    their K stays as it was rotated for the old places (naive truncation of KV)
whole   nothing is cut

`heads`, `heads-hidden` and `heads-mixed` in place of a form are heads of 0 and 4 tokens in KV form,
`hidden` and `mixed`. `book` is KV form on a third text, with as many samples as are asked for; all
other numbers are over the first two.

State comes from host memory through the server's scheduler, moves, restoration and rotation; TT is
an ordinary prompt of the same engine. The server keeps a whole block as head at least. A head of 0
tokens is asked for behind that rule. One of 4 does not end with a block, so no move can make the
cut path: the server's restorer is given the stored blocks as two restorations, head and rest.

Cells are kept in --cells and are not measured again, so that a run can be cut off and continued.
Rows of a result that is at --out already stay where these cells have fewer tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from benchmark import ROOT
from benchmark.harness import cells, machine
from benchmark.harness.cases import answer, run_case
from benchmark.quality.overflow_rows import (
    BOOK,
    CHUNK,
    DEFAULT_HEAD,
    DTYPES,
    FORMS,
    KINDS,
    NO_TT,
    SMALL,
    WINDOWS,
    form_of,
    merged,
    plot,
    rows_of,
    tables,
)

MODEL = "smollm2-135m"
PROSE = ("declaration.txt", "constitution.txt", "devils-dictionary.txt")
CHUNKS = {window: window // 2 // CHUNK for window in WINDOWS}
"""Chunks that are scored after a cut with the default head in KV form, by window: the text up to
the next cut, as in the paper. All other arms have FEWER."""

FEWER = 1

SIZE = max(window + CHUNK * chunks for window, chunks in CHUNKS.items())
"""Tokens of a sample at most."""

SPREAD = 2176
"""Tokens from the start of the last sample of a text to its end."""

OPTICKS = "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"
"""In the package `tvm_ffi`."""

FIRST_OF_BOOK = 1000
"""Number of the first sample of the book."""

GOLDEN = (math.sqrt(5) - 1) / 2

BATCH = 20
"""Samples of one engine before it is started again: what a crash can cost."""


class Sample(NamedTuple):
    """One conversation: its number, the kind of its text and its tokens."""

    number: int
    kind: str
    tokens: list[int]


def texts() -> dict[str, list[int]]:
    """Tokens by kind: public-domain English (benchmark/texts), two thirds of it the Constitution;
    the reference of the Python language that comes with the interpreter, half prose, half grammar
    and code; and Newton's Opticks, which comes with a package that SGLang needs in one version."""
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    from benchmark.harness.core import MODELS
    from benchmark.quality.real_text import tokens_of

    tokenizer = AutoTokenizer.from_pretrained(MODELS / MODEL)
    reference = "\n".join(topics[name] for name in sorted(topics))
    opticks = resources.files("tvm_ffi").joinpath(OPTICKS).read_text(encoding="utf-8")
    return {
        "prose": [token for name in PROSE for token in tokens_of(MODEL, name)],
        "reference": list(tokenizer.encode(reference, add_special_tokens=False)),
        BOOK: list(tokenizer.encode(opticks, add_special_tokens=False)),
    }


def samples(count: int, known: dict[str, list[int]]) -> list[Sample]:
    """`count` conversations, of KINDS in turn, spread over each text. The last ones end with it."""
    chosen = []
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        text = known[kind]
        of_kind = math.ceil((count - number % len(KINDS)) / len(KINDS))
        start = number // len(KINDS) * (len(text) - SPREAD) // max(1, of_kind - 1)
        chosen.append(Sample(number, kind, text[start : start + SIZE]))
    return chosen


def of_book(count: int, known: dict[str, list[int]]) -> list[Sample]:
    """`count` conversations spread over the book, however many they are: each next one lies in the
    widest gap so far (multiples of the golden ratio)."""
    text = known[BOOK]
    chosen = []
    for place in range(count):
        start = int(place * GOLDEN % 1 * (len(text) - SIZE))
        chosen.append(Sample(FIRST_OF_BOOK + place, BOOK, text[start : start + SIZE]))
    return chosen


def kept(tokens: Sequence[int], window: int, head: int) -> list[int]:
    """What a cut leaves of a full window: half of it, head included."""
    return [*tokens[:head], *tokens[head + window // 2 : window]]


class Told:
    """A rule of `--hc-overflow` that cuts where the experiment says, heads below a block too."""

    def __init__(self) -> None:
        from sglang_hc.policy.overflow import Cut
        from sglang_hc.srt.requests import overflow

        self._type = Cut
        self.say(0, 0)
        overflow._rule = lambda _: self

    def say(self, head: int, dropped: int) -> None:
        self._now = self._type(head, dropped)

    def cut(self, length: int, answer: int | None, keep_first: int | None = None) -> Any:
        return self._now

    def earlier(self, cut: Any) -> list[int]:
        return [0]


class Unmoved:
    """A rotation that leaves K as it is."""

    def move(self, layer: int, parts: Any, old: Any, new: Any) -> Any:
        return parts


class Bench:
    """One engine that scores what follows cuts of one conversation after the other."""

    def __init__(self, dtype: str, name: str) -> None:
        """name: a form, or what stands in place of one."""
        from benchmark.harness.core import Core

        self.form, self.small = form_of(name), name in SMALL
        self.core = Core(
            "--hc-forms", FORMS[self.form], "--dtype", dtype, "--hc-host-size-gb", "1.5",
            "--max-total-tokens", "12288", "--hc-overflow", "reembed", model=MODEL,
        )  # fmt: skip
        self.told = Told()

    def cells(self, sample: Sample, windows: Sequence[int]) -> dict[int, dict[str, list[float]]]:
        """Per window and arm the negative log probabilities of what follows, added up by chunks."""
        core, key = self.core, f"{sample.number}"
        core.ask(sample.tokens[: max(windows)], 1, key)
        core.settle()
        heads = self._small if self.small else self._default
        found = {window: heads(sample, window, key) for window in windows}
        if self.form == "kv" and not self.small:
            restorer = core.tree.tiers.restorer
            path, restorer.path = restorer.path, replace(restorer.path, rotation=Unmoved())
            core.evict()
            for window in windows:
                arm = f"NKVT {DEFAULT_HEAD}"
                found[window][arm] = self._moved(sample, window, DEFAULT_HEAD, FEWER, key)
            restorer.path = path
        core.evict()
        return found

    def _default(self, sample: Sample, window: int, key: str) -> dict[str, list[float]]:
        """The default head. In KV form up to the next cut, and what is not cut."""
        chunks = CHUNKS[window] if self.form == "kv" else FEWER
        arms = {
            f"ours {DEFAULT_HEAD}": self._moved(sample, window, DEFAULT_HEAD, chunks, key),
            f"TT {DEFAULT_HEAD}": self._recomputed(sample, window, DEFAULT_HEAD, chunks),
        }
        if self.form == "kv":
            arms["whole"] = self._score(sample, window, sample.tokens[:window], FEWER, key)
        return arms

    def _small(self, sample: Sample, window: int, key: str) -> dict[str, list[float]]:
        """Heads that the server does not keep."""
        heads = (0, 4) if self.form != NO_TT else ()
        arms = {f"TT {head}": self._recomputed(sample, window, head, FEWER) for head in heads}
        arms["ours 0"] = self._moved(sample, window, 0, FEWER, key)
        arms["ours 4"] = self._restored(sample, window, 4, key)
        return arms

    def _score(
        self,
        sample: Sample,
        window: int,
        before: Sequence[int],
        chunks: int,
        key: str,
        found: int = 0,
    ) -> list[float]:
        """The tokens behind the window, given those before the cut or what is left of them.

        found: tokens that must have come from the tiers.
        """
        chunks = min(chunks, (len(sample.tokens) - window) // CHUNK)
        tokens = [*before, *sample.tokens[window : window + CHUNK * chunks]]
        scored, reply = self.core.score_and_reply(tokens, len(before) - 1, key)
        came = reply.host + reply.storage
        assert came >= found, f"{came} tokens came from the tiers, not {found}"
        return [-sum(scored[i : i + CHUNK]) for i in range(0, len(scored), CHUNK)]

    def _recomputed(self, sample: Sample, window: int, head: int, chunks: int) -> list[float]:
        """What a cut leaves as a prompt of its own, prefilled."""
        left = kept(sample.tokens, window, head)
        return self._score(sample, window, left, chunks, f"TT {head} {sample.number}")

    def _moved(self, sample: Sample, window: int, head: int, chunks: int, key: str) -> list[float]:
        """After a cut by the server, with state that comes from host memory and moves."""
        self.told.say(head, window // 2)
        try:
            # The last kept token is computed again, with what follows.
            before, least = sample.tokens[:window], window // 2 - 1
            return self._score(sample, window, before, chunks, key, least)
        finally:
            self.told.say(0, 0)

    def _restored(self, sample: Sample, window: int, head: int, key: str) -> list[float]:
        """The same for a head that ends within a block: restored beside the server's tree."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        from sglang_hc.forms import BLOCK_TOKENS
        from sglang_hc.restore.path import Restoration
        from sglang_hc.tree.block_tree import BlockNode, Moved
        from sglang_hc.tree.identity import Prefix, pack_tokens
        from sglang_hc.tree.namespaces import client_namespace

        core, dropped = self.core, window // 2
        tiers, left = core.tree.tiers, kept(sample.tokens, window, head)
        slots = core.scheduler.token_to_kv_pool_allocator.alloc(len(left))

        def moved(node: BlockNode) -> BlockNode:
            node = copy(node)
            node.moved = Moved(node.block_id, dropped)
            return node

        prefix = Prefix(client_namespace(None, key), pack_tokens(sample.tokens[:window]))
        nodes = tiers.host.tree.match(prefix).nodes
        rest = tuple(map(moved, nodes[dropped // BLOCK_TOKENS :]))
        first = tiers.restorer.path.pool.layout.plan.recompute
        parts = [
            Restoration(nodes, 0, head, slots[:head], first, slots[:0]),
            Restoration(rest, head, len(left), slots[head:], first, slots[:head]),
        ]
        if first:
            for part in parts:
                tiers.restorer.path.recomputer.run(part, lambda: None)
        tiers.restorer.restore_early(parts)
        name = f"restored {head} {window} {key}"  # sharing a head, prompts would own slots twice
        whose = RadixKey(array("q", left), client_namespace(None, name))
        core.tree.insert(InsertParams(key=whose, value=slots))
        return self._score(sample, window, left, FEWER, name)


def measure(case: dict[str, Any]) -> list[str]:
    """Measure the samples of one case that are missing, up to BATCH; returns their keys."""
    file = cells.CellFile(Path(case["cells"]), "overflow table", case["command"])
    bench: Bench | None = None
    done: list[int] = []
    chosen = of_book if case["form"] == BOOK else samples
    for sample in chosen(case["samples"], texts()):
        missing = [
            window
            for window in case["windows"]
            if not file.has(cell_key(case["dtype"], case["form"], window, sample.number))
        ]
        if not missing:
            continue
        if len(done) >= BATCH:
            break
        bench = bench or Bench(case["dtype"], case["form"])
        begun = time.monotonic()
        found = bench.cells(sample, missing)
        seconds = (time.monotonic() - begun) / len(missing)
        for window, arms in found.items():
            key = cell_key(case["dtype"], case["form"], window, sample.number)
            file.add(key, {"kind": sample.kind, "arms": arms}, seconds)
        done.append(sample.number)
        print(f"{case['dtype']} {case['form']} {sample.number}: {seconds:.1f} s", file=sys.stderr)
    return [str(number) for number in done]


def cell_key(dtype: str, form: str, window: int, sample: int) -> str:
    return f"{dtype} {form} {window} {sample}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 cuts, windows 512 and 1024")
    parser.add_argument("--samples", type=int, default=40, help="cuts per window (default: 40)")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--forms", default=",".join([*FORMS, *SMALL, BOOK]))
    parser.add_argument("--windows", default=",".join(map(str, WINDOWS)))
    parser.add_argument("--cells", type=Path, help="keep measurements here and go on from them")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--plot", type=Path, help="draw perplexities into this PNG file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(measure(json.loads(args.case)))
        return 0
    if args.quick:
        args.samples, args.windows = 2, "512,1024"
    path = args.cells or Path("overflow-table.cells")
    script = [sys.executable, str(ROOT / "scripts" / "get_real_model.py")]
    if subprocess.run([*script, "--output", str(ROOT / "models")], check=False).returncode:
        return 2
    command = machine.command()
    for dtype in args.dtypes.split(","):
        for form in args.forms.split(","):
            case = {
                **{"dtype": dtype, "form": form, "samples": args.samples, "command": command},
                **{"windows": [int(w) for w in args.windows.split(",")], "cells": str(path)},
            }
            while done := run_case(machine.module(__file__), case, timeout=7200):
                print(f"{dtype} {form}: samples {', '.join(done)}", flush=True)
    found = cells.latest(cells.read(path))
    known = args.out is not None and args.out.exists()
    older = json.loads(args.out.read_text()) if known else {"rows": [], "measured_at": []}
    rows = merged(older["rows"], rows_of(found))
    made = tables(rows)
    for line in made["after-a-cut"]["rows"]:
        print("  ".join(line))
    if args.out is not None:
        result = {
            **machine.about("overflow table"),
            "note": older.get("note", ""),
            "measured_at": sorted({*older["measured_at"], *(c["commit"] for c in found.values())}),
            "seconds": round(sum(cell["seconds"] for cell in found.values())),
            "model": MODEL,
            "settings": {"plans": FORMS, "chunk": CHUNK, "chunks": CHUNKS, "fewer": FEWER},
            "rows": rows,
            "tables": made,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
