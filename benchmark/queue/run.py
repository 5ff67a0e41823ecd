"""A queue of 32 returning conversations over a disk tier, on real servers: what decides helps whom?

    python -m benchmark.queue.run [--out benchmark/results/cpu-queue.json]

Arms are servers that differ in --hc-eviction and --hc-prefetch only, all up at once and asked in
turn (A B C, C B A, ...). One round of one arm:

  1. 32 new conversations have their first turn, one after the other. Host memory holds about eight
     of them, the device fewer; all full blocks are on disk before the round goes on.
  2. Two unrelated requests take the two places in the batch and go on answering, so that a queue
     forms.
  3. The second turns of all 32 arrive in another, random order.

Every server records its load, and with it what each request hit (--hc-trace).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmark.harness import machine
from benchmark.harness.cells import rounded
from benchmark.harness.client import Client, Reply
from benchmark.harness.options import demo_model
from benchmark.harness.server import ServerProcess
from benchmark.harness.workload import History
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.workloads.sessions import Ids, Session, Span, Turn
from sglang_hc.tree.identity import pack_tokens

ARMS = {
    "queue": ("queue", "queue"),
    "lru, on arrival": ("lru", "on-arrival"),
    "lru, off": ("lru", "off"),
}
"""--hc-eviction and --hc-prefetch. With `off` blocks on disk are not read: those tokens are
recomputed."""

TALKS = 32
PROMPT, REPLY, QUESTION, ANSWER = 320, 8, 24, 4
BUSY = 64, 24
"""Prompt and answer, in tokens, of the requests that keep the server busy."""

DEVICE_TOKENS = 1200
HOST_GB = 0.18
RUNNING = 2

Round = dict[str, Any]


def flags(arm: str, model: str, folder: Path) -> list[str]:
    eviction, prefetch = ARMS[arm]
    name = arm.replace(", ", "-").replace(" ", "-")
    return [
        *("--model-path", model, "--dtype", "float32"),
        *("--enable-cache-report", "--sleep-on-idle"),
        *("--max-total-tokens", str(DEVICE_TOKENS), "--max-running-requests", str(RUNNING)),
        *("--hc-forms", "kv", "--hc-host-size-gb", str(HOST_GB)),
        *("--hc-disk", f"{folder / name}:6", "--hc-eviction", eviction, "--hc-prefetch", prefetch),
        *("--hc-trace", str(folder / f"{name}.jsonl")),
    ]


def say(history: History, rng: random.Random, length: int) -> History:
    """The user adds so many random tokens."""
    said = Ids(pack_tokens([rng.randrange(3, 8000) for _ in range(length)]))
    history.ask(Turn((said,), Span(0, 0)))
    return history


def talk(rng: random.Random, length: int) -> History:
    return say(History(Session(0.0, ())), rng, length)


async def tier_numbers(client: Client) -> dict[str, int]:
    """The tiers' own counts in /server_info."""
    info = await client.get_json("/server_info")
    numbers = info["internal_states"][0]["hc"]
    return {name: value for name, value in numbers.items() if isinstance(value, int)}


async def on_disk(client: Client, wanted: int) -> None:
    """Wait until so many blocks have been written since the start."""
    deadline = time.monotonic() + 60
    while (await tier_numbers(client)).get("disk_saved_blocks", 0) < wanted:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {await tier_numbers(client)} after 60 s, {wanted} wanted")
        await asyncio.sleep(0.25)


async def one_round(url: str, number: int, talks: int) -> tuple[Round, list[Reply]]:
    rng = random.Random(number)
    async with Client(url, 600) as client:
        saved = (await tier_numbers(client)).get("disk_saved_blocks", 0)
        histories = [talk(rng, PROMPT) for _ in range(talks)]
        for history in histories:
            history.answer((await client.ask(history, REPLY)).ids)
        # The last token of a reply is never computed, so it is in no block.
        stored = (PROMPT + REPLY - 1) // BLOCK_TOKENS
        await on_disk(client, saved + talks * stored)
        before = await tier_numbers(client)
        for history in histories:
            say(history, rng, QUESTION)
        order = rng.sample(range(talks), talks)
        prompt, answer = BUSY
        busy = [asyncio.create_task(client.ask(talk(rng, prompt), answer)) for _ in range(RUNNING)]
        await asyncio.sleep(0.5)
        asked = {}
        for index in order:
            asked[index] = asyncio.create_task(client.ask(histories[index], ANSWER))
            await asyncio.sleep(0.005)  # so that they queue in this order
        replies = [await asked[index] for index in range(talks)]
        for task in busy:
            await task
        after = await tier_numbers(client)
    waits = sorted(reply.ttft_s for reply in replies)
    hits = {tier: sum(r.hits.get(tier, 0) for r in replies) for tier in ("host", "storage")}
    return {
        "prompt_tokens": sum(reply.prompt_tokens for reply in replies),
        "device_tokens": sum(reply.hits.get("device", 0) for reply in replies),
        "host_tokens": hits["host"],
        "storage_tokens": hits["storage"],
        "ttft_median": statistics.median(waits),
        "ttft_p90": waits[int(0.9 * (len(waits) - 1))],
        "changed": {k: after[k] - before.get(k, 0) for k in after if after[k] != before.get(k, 0)},
    }, replies


def queued_hits(record: Path, talks: int) -> list[dict[str, int]]:
    """Of each round's queue, from the record: tokens hit in the tiers, and of them those of
    requests that were never passed over to wait for the disk."""
    rounds: list[dict[str, int]] = []
    late: set[int] = set()
    events = [json.loads(line) for line in record.read_text().splitlines()]
    each = 2 * talks + RUNNING
    # Before the first round the server warms itself up.
    admitted = -(sum(event.get("op") == "admit" for event in events) % each)
    for event in events:
        if event.get("op") == "passed":
            late.add(event["req"])
        elif event.get("op") == "admit":
            place = admitted % each if admitted >= 0 else -1
            admitted += 1
            if place == 0:
                rounds.append({"hit_tokens": 0, "in_time_tokens": 0, "late_requests": 0})
            if place >= talks + RUNNING:
                in_time = event["req"] not in late
                rounds[-1]["hit_tokens"] += event["hit"]
                rounds[-1]["in_time_tokens"] += event["hit"] * in_time
                rounds[-1]["late_requests"] += not in_time
    return rounds


def middle(runs: Sequence[Round], arm: str, key: str) -> float:
    return float(statistics.median(run[key] for run in runs if run["arm"] == arm))


def tables(runs: Sequence[Round]) -> dict[str, Any]:
    rows, ratios = [], []
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    for arm in arms:
        own = [run for run in runs if run["arm"] == arm]
        hit = sum(run["hit_tokens"] for run in own)
        in_time = 100 * sum(run["in_time_tokens"] for run in own) / hit if hit else 0.0
        rows.append(
            [
                arm,
                f"{100 * hit / sum(run['prompt_tokens'] for run in own):.1f}",
                f"{in_time:.1f}" if hit else "-",
                f"{middle(runs, arm, 'ttft_median'):.2f}",
                f"{middle(runs, arm, 'ttft_p90'):.2f}",
            ]
        )
    first = arms[0]
    by_round = {(run["arm"], run["round"]): run for run in runs}
    for arm in arms[1:]:
        for key in ("ttft_median", "ttft_p90"):
            times = [
                by_round[arm, n][key] / by_round[first, n][key]
                for n in sorted({run["round"] for run in runs})
            ]
            spread = f"{min(times):.2f} to {max(times):.2f}"
            ratios.append(
                [f"{first} against {arm}", key, f"{statistics.median(times):.2f}", spread]
            )
    return {
        "arms": {
            "columns": [
                "arm",
                "hit, % of prompt tokens",
                "of them in DRAM at the turn, %",
                "median TTFT, s",
                "p90 TTFT, s",
            ],
            "rows": rows,
        },
        "ratios": {"columns": ["", "metric", "times better", "range"], "rows": ratios},
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = args.model or demo_model(allowed=True)
    runs: list[Round] = []
    tokens: dict[tuple[str, int], list[list[int]]] = {}
    commands = {arm: flags(arm, model, folder) for arm in args.arms}
    with ExitStack() as stack:
        urls = {}
        for arm, words in commands.items():
            log = folder / f"{arm}.log"
            server = ServerProcess("sglang_hc.launch_server", words, {"OMP_NUM_THREADS": "1"}, log)
            urls[arm] = stack.enter_context(server).url
        for number in range(args.rounds):
            for arm in list(urls) if number % 2 == 0 else list(urls)[::-1]:
                run, replies = asyncio.run(one_round(urls[arm], number, args.talks))
                runs.append({"arm": arm, "round": number, **run})
                tokens[arm, number] = [reply.ids for reply in replies]
                print(json.dumps(rounded(runs[-1])), flush=True)
        time.sleep(1)  # the last events are written
    for arm, words in commands.items():
        record = Path(words[words.index("--hc-trace") + 1])
        counted = queued_hits(record, args.talks)
        for run in runs:
            if run["arm"] == arm:
                run.update(counted[run["round"]])
    first = args.arms[0]
    equal = sum(
        a == b
        for (_, number), ids in tokens.items()
        for a, b in zip(ids, tokens[first, number], strict=True)
    )
    return {
        **machine.about("queue"),
        "settings": {
            "talks": args.talks,
            "rounds": args.rounds,
            "prompt": PROMPT,
            "reply": REPLY,
            "question": QUESTION,
            "answer": ANSWER,
            "device_tokens": DEVICE_TOKENS,
            "busy": BUSY,
            "host_gb": HOST_GB,
            "max_running_requests": RUNNING,
            "arms": {arm: shlex.join(words[2:-2]) for arm, words in commands.items()},
        },
        "rounds": runs,
        "replies": {"equal_to_first_arm": equal, "of": sum(map(len, tokens.values()))},
        "tables": tables(runs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model (default: models/demo)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--talks", type=int, default=TALKS)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, help="result as JSON (default: printed)")
    parser.add_argument("--keep", type=Path, help="folder for logs and records (default: removed)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = rounded(measure(args, folder))
    text = json.dumps(result, indent=1) + "\n"
    if args.out is None:
        print(text)
    else:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
