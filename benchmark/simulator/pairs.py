"""Records of real servers, and a profile of their machine, for `sglang-hc calibrate`.

    OMP_NUM_THREADS=1 python -m benchmark.simulator.pairs --output FOLDER [--only ARM ...]

First this machine is measured (profile.json), unless the folder has a profile; then each arm serves
its load and records it (ARM.jsonl), and is compared at once. `stock` has no tiers; `kv`, `hidden`
and `auto` are asked by chats that come back after the device has forgotten them, `queue` is the arm
"lru, on arrival" of benchmark/queue, one round of it. Exit status 1 if one is outside.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from benchmark.harness.client import Client
from benchmark.harness.driver import Pace, drive
from benchmark.harness.options import demo_model
from benchmark.harness.server import ServerProcess
from benchmark.harness.workload import (
    ChatSpec,
    Distribution,
    Vocabulary,
    synthetic_chat,
)
from benchmark.queue import run as queue
from sglang_hc.tools.cli.main import main as sglang_hc

CHATS = ("stock", "kv", "hidden", "auto")
ARMS = (*CHATS, "queue")

COMMITTED = Path(__file__).parent / "records"
"""Records and profile that the tests compare, and the table of README.md."""

QUEUE = "lru, on arrival"

FLAGS = ("--dtype", "float32")
"""Of every server, and of the profile."""

DEVICE_TOKENS = 1600
HOST_GB = 1.0
SESSIONS, TURNS = 12, 3
SYSTEM, ASKED, ANSWER = 384, "uniform:24:64", "uniform:6:12"

VOCABULARY = Vocabulary(8000, frozenset(range(3)))


async def chat(url: str) -> None:
    """One request at a time: between two turns of a chat all others have theirs, so that the device
    has forgotten it."""
    spec = ChatSpec(
        sessions=SESSIONS,
        turns=Distribution.parse(str(TURNS), "turns"),
        input_len=Distribution.parse(ASKED, "input"),
        output_len=Distribution.parse(ANSWER, "output"),
        think=Distribution.parse("0", "think"),
        system_len=SYSTEM,
    )
    made = VOCABULARY.spoken(synthetic_chat(spec, [0]), [1])
    async with Client(url, 600) as client:
        done = await drive(client, made, Pace(max_parallel=1, round_barrier=True))
    if done.failed:
        raise SystemExit(f"{len(done.failed)} requests failed: {done.failed[0].error}")


def committed() -> list[Path]:
    """The record of each arm that is compared, in the order of ARMS."""
    return [COMMITTED / f"{arm}.jsonl" for arm in ARMS]


def flags(arm: str, model: str, folder: Path, record: Path) -> list[str]:
    if arm == "queue":
        return [*queue.flags(QUEUE, model, folder)[:-1], str(record)]
    tiers = ["--hc-disable"]
    if arm != "stock":
        tiers = ["--hc-forms", arm, "--hc-host-size-gb", str(HOST_GB)]
    return [
        *("--model-path", model, *FLAGS, "--enable-cache-report", "--sleep-on-idle"),
        *("--max-total-tokens", str(DEVICE_TOKENS), *tiers, "--hc-trace", str(record)),
    ]


def record(arm: str, model: str, folder: Path, out: Path) -> None:
    """Serve the arm's load; its record is `out` then."""
    out.unlink(missing_ok=True)
    words = flags(arm, model, folder, out)
    log = folder / f"{arm}.log"
    with ServerProcess("sglang_hc.launch_server", words, {"OMP_NUM_THREADS": "1"}, log) as server:
        if arm == "queue":
            asyncio.run(queue.one_round(server.url, 0, queue.TALKS))
        else:
            asyncio.run(chat(server.url))
        time.sleep(1)  # the last events are written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model (default: models/demo)")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--output", type=Path, required=True, help="folder, made if need be")
    args = parser.parse_args()
    model = args.model or demo_model(allowed=True)
    args.output.mkdir(parents=True, exist_ok=True)
    profile = args.output / "profile.json"
    outside = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if not profile.exists():
            words = ["profile", "--model", model, "--output", str(profile)]
            if sglang_hc([*words, "--hc-disk", f"{folder / 'profile'}:6", "--", *FLAGS]):
                return 2
        for arm in args.only:
            out = args.output / f"{arm}.jsonl"
            record(arm, model, folder, out)
            print(f"\n{arm}")
            outside |= sglang_hc(["calibrate", "--record", str(out), "--profile", str(profile)])
    return outside


if __name__ == "__main__":
    sys.exit(main())
