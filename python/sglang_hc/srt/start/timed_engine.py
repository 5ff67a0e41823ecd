"""What passes of a whole engine take: over a prompt, and decode steps. For the simulator.

A layer alone does not show them (`restore.probe`): timed again and again its weights stay in the
caches of a processor, a step is many short kernels or calls, and around the layers are embedding,
LM head, scheduler and detokenizer. So SGLang's own engine runs, without our tiers, in a process of
its own:

    python -m sglang_hc.srt.start.timed_engine MODEL [FLAGS OF SGLANG ...]

It prints one line of JSON, `Timed` by its fields.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from sglang_hc.errors import ConfigError
from sglang_hc.srt.arguments.server_args import ALWAYS_ENV

BATCHES = (1, 2, 4, 8)
CONTEXTS = (64, 512)
"""Requests of a timed step, and tokens behind which each of them decodes."""

STEPS = 8
"""Timed together."""

ROUNDS = 3
"""Of each size; the middle one counts: it is what passes take, with what a server does beside."""

CONTEXT = 512
PASSES = ((16, 0), (64, 0), (256, 0), (512, 0), (16, CONTEXT), (64, CONTEXT), (256, CONTEXT))
"""New tokens of a timed prompt, and tokens before them that the device has."""


class Timed(NamedTuple):
    """steps: (requests, tokens of all their contexts, seconds of a step). passes: (new tokens,
    tokens before them, seconds from a prompt to its first token)."""

    steps: list[tuple[int, int, float]]
    passes: list[tuple[int, int, float]]


def timed_engine(model: str, flags: Sequence[str]) -> Timed:
    """Start an engine, time it, and end it. Raises ConfigError with what the engine said last."""
    command = [sys.executable, "-m", __name__, model, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise ConfigError(f"no engine of {model} could be timed: {said[:300]}")
    found = json.loads(lines[-1])
    return Timed(
        *([(int(n), int(c), float(s)) for n, c, s in found[kind]] for kind in Timed._fields)
    )


class _Engine:
    """SGLang's engine on random tokens."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        from sglang.srt.entrypoints.engine import Engine
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        os.environ[ALWAYS_ENV] = "1"
        load_plugins()
        # Ids go in and come out: no tokenizer is needed.
        own = ["--hc-disable", "--skip-tokenizer-init", "--skip-server-warmup"]
        args = prepare_server_args(["--model-path", model, *own, "--log-level", "error", *flags])
        self._engine = Engine(server_args=args)
        config = self._engine.tokenizer_manager.model_config
        info = self._engine.get_server_info()
        self._vocab = int(config.vocab_size)
        self.window = int(config.context_len)
        self.pool = int(info["max_total_num_tokens"])
        self._random = random.Random(0)

    def prompt(self, tokens: int) -> list[int]:
        """One that was never seen."""
        return [self._random.randrange(self._vocab) for _ in range(tokens)]

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        """Until each prompt has so many tokens of an answer."""
        options: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
        begin = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=options)
        return time.perf_counter() - begin

    def close(self) -> None:
        self._engine.shutdown()


def measure(engine: _Engine) -> Timed:
    """The first run of each size pays for its prompts, which SGLang keeps, and for kernels."""
    most = min(engine.window, engine.pool // max(BATCHES)) - STEPS - 2
    steps = []
    for context in sorted({min(most, context) for context in CONTEXTS}):
        for batch in BATCHES:
            prompts = [engine.prompt(context) for _ in range(batch)]
            engine.seconds(prompts, STEPS + 1)
            long, short = (
                median(engine.seconds(prompts, count) for _ in range(ROUNDS))
                for count in (STEPS + 1, 1)
            )
            seconds = max((long - short) / STEPS, 1e-6)
            steps.append((batch, batch * (context + STEPS // 2), seconds))
    return Timed(steps, list(_passes(engine, most)))


def _passes(engine: _Engine, most: int) -> Iterator[tuple[int, int, float]]:
    """Over one prompt each; all sizes are smaller where the largest has more than `most` tokens."""
    share = min(1.0, most / max(map(sum, PASSES)))
    before = engine.prompt(CONTEXT)
    for new, context in ((max(1, int(n * share)), int(c * share)) for n, c in PASSES):
        # The first one leaves what the others find, and pays for kernels.
        _, *times = (
            engine.seconds([before[:context] + engine.prompt(new)], 1) for _ in range(ROUNDS + 1)
        )
        yield new, context, median(times)


def main() -> None:
    engine = _Engine(sys.argv[1], sys.argv[2:])
    try:
        found = measure(engine)
    finally:
        engine.close()
    print(json.dumps(found._asdict()), flush=True)


if __name__ == "__main__":
    main()
