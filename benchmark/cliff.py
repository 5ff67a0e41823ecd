"""The capacity cliff: more and more conversations, until the KV pool holds a quarter of them.

So many users as a point says talk at once, each waits for the reply before the next turn, and
begins another conversation after the last one. A conversation that is gone from the pool when its
next turn comes is computed again by plain SGLang, which then computes histories instead of replies.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.harness import cliff_report, experiment, metrics, options
from benchmark.harness.driver import Pace
from benchmark.harness.options import Setup
from benchmark.harness.points import Point
from benchmark.harness.workload import ChatSpec, Distribution, synthetic_chat
from sglang_hc.tools.cli.main import UsageError
from sglang_hc.tools.workloads.sessions import Session, Turn, Workload

_DEFAULTS = {
    "arms": "stock,hicache,sglang-hc",
    "system_len": 4096,
    "turns": 6,
    "input_len": 128,
    "output_len": 128,
    "think": 0.0,
    "window": 60.0,
    "past": 4.0,
    "repeat": 2,
    "servers": "together",
    "host_size_gb": 16.0,
}
_QUICK = {
    "arms": "stock,kv",
    "system_len": 320,
    "input_len": 32,
    "output_len": 24,
    "window": 10.0,
    "max_total_tokens": 2048,
    "host_size_gb": 2.0,
    "server_args": "--dtype float32",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    options.configure(parser, "out/cliff")
    talk = parser.add_argument_group("conversation", "lengths in tokens")
    talk.add_argument("--system-len", type=int, help="its own system prompt (default 4096)")
    talk.add_argument("--turns", type=int, help="turns of a conversation (default 6)")
    talk.add_argument("--input-len", type=int, help="new tokens of a turn (default 128)")
    talk.add_argument("--output-len", type=int, help="tokens of a reply (default 128)")
    talk.add_argument("--think", type=float, help="seconds between reply and turn (default 0)")
    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--window", type=float, help="seconds that are measured (default 60)")
    sweep.add_argument(
        "--past",
        type=float,
        help="go on until so many times the conversations that the KV pool holds (default 4)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark. Returns the exit status."""
    options.apply_preset(args, _DEFAULTS, _QUICK)
    _check(args)
    args.no_compare = True  # whoever shares a batch changes the rounding
    setup = options.prepare(args)
    pool, tokens = _pool_tokens(setup), mean_tokens(args)
    if pool < tokens:
        raise UsageError(
            f"the KV pool has {pool} tokens, and a conversation {tokens:.0f}: give a smaller "
            "--system-len, fewer --turns, or a larger --max-total-tokens"
        )
    points = [_point(setup, users) for users in doubled(args.past * pool / tokens)]
    extra = {"sweep": "conversations at once", "pool_tokens": pool, "conversation_tokens": tokens}
    return experiment.execute(
        "cliff", setup, points, metrics.by_label, extra=extra, show=_on_console
    )


def _check(args: argparse.Namespace) -> None:
    for name, least in (("turns", 1), ("input_len", 1), ("output_len", 1), ("system_len", 0)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}")
    if not args.window > 0:
        raise UsageError("--window must be positive")
    if not args.think >= 0:
        raise UsageError("--think must not be negative")
    if not 1 <= args.past <= 1000:
        raise UsageError("--past must be from 1 to 1000")


def _pool_tokens(setup: Setup) -> int:
    """Tokens in the smallest KV pool of all servers. Raises UsageError where nobody tells."""
    size = setup.args.max_total_tokens
    if not setup.args.base_url:
        if not size:
            raise UsageError("--max-total-tokens is needed: the sweep goes by what the pool holds")
        return int(size)
    told = [options.server_info(arm.url).get("max_total_num_tokens") for arm in setup.arms]
    sizes = [size for size in told if isinstance(size, int)]
    if len(sizes) < len(told):
        raise UsageError("--base-url: a server does not tell max_total_num_tokens in /server_info")
    return min(sizes)


def mean_tokens(args: argparse.Namespace) -> float:
    """Of a conversation behind a reply, on the average of its turns."""
    return float(args.system_len + (args.turns + 1) / 2 * (args.input_len + args.output_len))


def doubled(most: float) -> list[int]:
    """1, 2, 4, ... up to the first that is not below `most`."""
    return [1 << step for step in range(math.ceil(math.log2(max(1.0, most))) + 1)]


def _point(setup: Setup, users: int) -> Point:
    args = setup.args
    fixed = functools.partial(Distribution, "constant")
    spec = ChatSpec(
        sessions=4 * users + math.ceil(10 * args.window),
        turns=fixed((args.turns,)),
        input_len=fixed((args.input_len,)),
        output_len=fixed((args.output_len,)),
        think=fixed((args.think,)),
        system_len=args.system_len,
    )

    @functools.cache
    def workload(repeat: int) -> Workload:
        seed = [args.seed, users, repeat]
        made = in_midst(synthetic_chat(spec, seed), users)
        return setup.vocabulary.spoken(labelled(made, f"users={users}"), seed)

    return Point(f"users={users}", users, workload, Pace(users, window_s=args.window))


def in_midst(workload: Workload, users: int) -> Workload:
    """The first conversation of each user is under way already, each at another turn: what was said
    in it is its first prompt. Else all would begin anew, and end, at once."""

    def started(index: int, session: Session) -> Session:
        turns = session.turns
        done = index * len(turns) // users if index < users else 0
        before = itertools.chain.from_iterable((*turn.said, turn.answer) for turn in turns[:done])
        first = dataclasses.replace(turns[done], said=(*before, *turns[done].said), think=0.0)
        return dataclasses.replace(session, turns=(first, *turns[done + 1 :]))

    sessions = tuple(started(i, session) for i, session in enumerate(workload.sessions))
    return dataclasses.replace(workload, sessions=sessions)


def labelled(workload: Workload, label: str) -> Workload:
    """The same, counted under a label."""

    def turn(one: Turn) -> Turn:
        return dataclasses.replace(one, label=label)

    sessions = (
        dataclasses.replace(session, turns=tuple(map(turn, session.turns)))
        for session in workload.sessions
    )
    return dataclasses.replace(workload, sessions=tuple(sessions))


def _on_console(result: dict[str, Any], plots: Sequence[Path], output: Path) -> str:
    names = ", ".join(path.name for path in plots)
    return (
        f"{cliff_report.table(result).markdown()}\n\n{cliff_report.sentence(result)}\n\n"
        f"results in {output}: result.json, report.html, {names}"
    )
