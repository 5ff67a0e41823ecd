"""Passes of a model whose weights come over a slow link, and a conversation that returns there.

    python -m benchmark.throughput.link --json OUT

SGLang's scheduler serves single requests in this process (harness/core.py), with all layers in host
memory (`--hc-offload-gb`). Copies from host memory, of weights and of state, share one token bucket
(harness/throttled.py): it runs beside the computation, as the link of a GPU does. What a CPU takes
for the copies themselves counts as computing.

- *passes*: chunks of one prompt, one behind the other, with weights that are copied ahead of their
  layer and with weights that come when it begins (harness/in_line.py). The link is half, once and
  twice as fast as would take as long as computing.
- *returning*: the first token of a conversation that has left the device, restored from host memory
  and recomputed, where the link takes twice as long as computing a chunk. The state that comes back
  shares the link.

Arms take turns; numbers are medians.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmark.harness import machine
from benchmark.harness.cells import rounded
from benchmark.harness.core import Core
from benchmark.harness.in_line import InLineRing
from benchmark.harness.report import Table
from benchmark.harness.throttled import ThrottledCopyStream

LINKS = {"half the balance": 0.5, "the balance": 1.0, "twice the balance": 2.0}
RETURNS = 0.5
"""Of the link's rate over the balance when a conversation returns."""

NEW = 64
"""Tokens of a conversation's new turn."""


class Linked:
    """An engine with all weights behind a link of a given speed."""

    def __init__(self, model: str, chunk: int, tokens: int) -> None:
        """chunk: tokens of a pass. tokens: of the longest prompt."""
        from sglang_hc.srt.model import offload
        from sglang_hc.srt.start import build

        self.link = ThrottledCopyStream(math.inf)
        with (
            mock.patch.object(offload, "WeightRing", InLineRing),
            mock.patch.object(offload, "copy_stream_for", lambda *_: self.link),
            mock.patch.object(build, "copy_stream_for", lambda *_: self.link),
        ):
            self.core = Core(
                *("--hc-offload-gb", "64", "--hc-forms", "kv", "--hc-host-size-gb", "0.5"),
                *("--chunked-prefill-size", str(chunk), "--max-total-tokens", str(2 * tokens)),
                *("--dtype", "float32", "--disable-overlap-schedule"),
                *("--mem-fraction-static", "0.5"),
                model=model,
                SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
                SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
            )
        runner = self.core.scheduler.tp_worker.model_runner
        self.ring: InLineRing = self.core.model_state.weights.ring
        self.vocabulary: int = runner.model_config.vocab_size
        self.ends: list[float] = []
        """When each pass of the model ended."""
        runner.forward = self._noting(runner.forward)

    def _noting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            result = forward(*args, **options)
            self.ends.append(time.perf_counter())
            return result

        return noted

    def link_seconds(self, bytes_per_s: float) -> float:
        """That the weights of a pass take to come."""
        return self.ring.bytes / bytes_per_s

    def passes(self, prompt: Sequence[int], ahead: bool, bytes_per_s: float) -> list[float]:
        """Seconds of each pass of a prompt but the first one, which finds the link idle: from the
        end of the one before it."""
        self.ring.ahead, self.link.bytes_per_s = ahead, bytes_per_s
        del self.ends[:]
        self.core.ask(prompt, 1, salt=f"never stored {time.monotonic()}")
        return [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]

    def first_token(self, prompt: Sequence[int], salt: str | None) -> tuple[float, int, Any]:
        """Seconds until it, the passes that it took, and the reply."""
        self.ring.ahead = True
        del self.ends[:]
        begin = time.perf_counter()
        reply = self.core.ask(prompt, 1, salt)
        return self.ends[-1] - begin, len(self.ends), reply


def random_tokens(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(count)]


def measure_passes(engine: Linked, prompt: Sequence[int], rounds: int) -> dict[str, Any]:
    """Of each link, by arm: every pass's seconds, and its computing without a link."""
    engine.passes(prompt, True, math.inf)
    computing = median(engine.passes(prompt, True, math.inf))
    balance = engine.ring.bytes / computing
    found: dict[str, Any] = {
        name: {"bytes_per_s": factor * balance, "compute": [], "ahead": [], "in line": []}
        for name, factor in LINKS.items()
    }
    for _ in range(rounds):
        for one in found.values():
            one["compute"].append(engine.passes(prompt, True, math.inf))
            one["ahead"].append(engine.passes(prompt, True, one["bytes_per_s"]))
            one["in line"].append(engine.passes(prompt, False, one["bytes_per_s"]))
    for one in found.values():
        one["link"] = engine.link_seconds(one["bytes_per_s"])
    return found


def over_the_slower(found: dict[str, Any], arm: str) -> float:
    """Median of passes over the longer of link and compute, as the latter was in the same turn."""
    ratios: list[float] = [
        seconds / max(found["link"], computed)
        for passes, computing in zip(found[arm], found["compute"], strict=True)
        for seconds, computed in zip(passes, computing, strict=True)
    ]
    return median(ratios)


def passes_table(found: dict[str, Any]) -> Table:
    rows = []
    for name, one in found.items():
        arms = ("compute", "ahead", "in line")
        seconds = [median(chain.from_iterable(one[arm])) for arm in arms]
        rows.append((
            name,
            *(f"{1e3 * each:.0f}" for each in (one["link"], *seconds)),
            *(f"{over_the_slower(one, arm):.2f}" for arm in arms[1:]),
        ))  # fmt: skip
    columns = (
        *("link", "link, ms", "compute, ms", "pass, copied ahead, ms", "pass, in line, ms"),
        *("ahead over the slower", "in line over the slower"),
    )
    return Table("passes", columns, tuple(rows))


def measure_return(
    engine: Linked, history: Sequence[int], bytes_per_s: float, rounds: int
) -> dict[str, Any]:
    """First tokens of a new turn behind a history, by arm, in seconds and passes of the model."""
    rng = random.Random(2)
    engine.link.bytes_per_s = math.inf
    engine.core.ask(history, 1)
    engine.core.settle()
    engine.link.bytes_per_s = bytes_per_s
    found: dict[str, Any] = {"pass": engine.link_seconds(bytes_per_s)}
    for _ in range(rounds):
        turn = [*history, *random_tokens(rng, NEW, engine.vocabulary)]
        said = []
        for arm, salt in (("restored", None), ("recomputed", f"new {time.monotonic()}")):
            engine.core.evict()
            seconds, passes, reply = engine.first_token(turn, salt)
            assert reply.host == (len(history) if salt is None else 0), f"{arm}: {reply}"
            found.setdefault(arm, []).append((seconds, passes))
            said.append(reply.tokens)
            engine.core.settle()
        assert said[0] == said[1], "what was restored answers otherwise"
    return found


def returning_table(found: dict[str, Any], history: int) -> Table:
    rows = []
    for arm in ("restored", "recomputed"):
        seconds = median(one for one, _ in found[arm])
        passes = median(one for _, one in found[arm])
        rows.append((arm, f"{seconds:.2f}", f"{seconds / found['pass']:.2f}", f"{passes:g}"))
    columns = (
        f"{history} tokens, {NEW} new", "first token, s", "over the link of a pass", "passes run",
    )  # fmt: skip
    return Table("returning", columns, tuple(rows))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-gqa", help="a folder of models/")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a pass")
    parser.add_argument("--history", type=int, default=768, help="tokens of the conversation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, too")
    args = parser.parse_args(words)
    about = machine.about("throughput-link")
    rng = random.Random(1)
    with torch.no_grad():
        engine = Linked(args.model, args.chunk, args.history + 4 * args.chunk)
        prompt = random_tokens(rng, 4 * args.chunk, engine.vocabulary)
        passes = measure_passes(engine, prompt, args.rounds)
        history = random_tokens(rng, args.history, engine.vocabulary)
        rate = RETURNS * passes["the balance"]["bytes_per_s"]
        returning = measure_return(engine, history, rate, args.rounds)
    tables = [passes_table(passes), returning_table(returning, args.history)]
    for table in tables:
        print(table.markdown(), end="\n\n")
    if args.json:
        result = {
            **about,
            "tables": {one.title: {"columns": one.head, "rows": one.rows} for one in tables},
            "passes": passes,
            "returning": returning,
        }
        args.json.write_text(json.dumps(rounded(result), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
