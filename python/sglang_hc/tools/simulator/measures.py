"""What a simulation counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.simulator.gpu import GpuTime
from sglang_hc.tools.simulator.prompts import Prompt

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class Measures:
    """Sums over the turns after the warm-up; `output_tokens`, `served_tokens` (prompts
    and answers), `prefill_share` and `gpu` are of all turns.

    A token is hit when its state was in some tier at admission, whether or not restoring it was
    cheaper than recomputing it; `restored` counts those that were restored. A turn is hit when
    every full block of its prompt that was ever stored was found; a session's first turn is none.
    Times in seconds: a turn waits from its arrival to its admission (queue_wait), then for its
    first token (service_ttft); ttft is both. prefill_share: of the GPUs' work until fewer
    conversations were left than the batch holds.
    """

    turns: int = 0
    turn_hits: int = 0
    prompt_tokens: int = 0
    reusable: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    restored: int = 0
    returning_turns: int = 0
    output_tokens: int = 0
    served_tokens: int = 0
    prefill_share: float = 0.0
    ttft: list[float] = field(default_factory=list, repr=False)
    queue_wait: list[float] = field(default_factory=list, repr=False)
    service_ttft: list[float] = field(default_factory=list, repr=False)
    gpu: GpuTime = field(default_factory=GpuTime)

    def answered(self, prompt: Prompt, now: float) -> None:
        """One counted turn gets its first token."""
        job, found = prompt.job, prompt.found
        blocks, tokens = prompt.reusable
        self.turns += 1
        self.prompt_tokens += job.prompt_tokens
        # Rows of a block that is equal only in part are found too, but counted by no block.
        self.reusable += max(tokens, found.tokens)
        self.device += found.device
        self.host += found.host
        self.disk += found.disk
        self.restored += prompt.restored
        self.ttft.append(now - job.arrived)
        self.queue_wait.append(prompt.admitted - job.arrived)
        self.service_ttft.append(now - prompt.admitted)
        if blocks:
            self.returning_turns += 1
            self.turn_hits += found.tokens >= min(blocks * BLOCK_TOKENS, job.prompt_tokens - 1)

    @property
    def hit_tokens(self) -> int:
        return self.device + self.host + self.disk

    def as_json(self) -> dict[str, float | int]:
        """Shares in [0, 1]; times in seconds."""

        def share(part: float, whole: float) -> float:
            return part / whole if whole else 0.0

        return {
            "hit_rate": share(self.hit_tokens, self.prompt_tokens),
            "turn_hit_rate": share(self.turn_hits, self.turns),
            "dram_share_of_hits": share(self.device + self.host, self.hit_tokens),
            "turns": self.turns,
            "returning_turns": self.returning_turns,
            "returning_turn_hit_rate": share(self.turn_hits, self.returning_turns),
            "reusable_hit_rate": share(self.hit_tokens, self.reusable),
            "reusable_share": share(self.reusable, self.prompt_tokens),
            "restored_share": share(self.restored, self.prompt_tokens),
            "device_hit_tokens": self.device,
            "host_hit_tokens": self.host,
            "disk_hit_tokens": self.disk,
            "prompt_tokens": self.prompt_tokens,
            **spread("queue_wait", self.queue_wait),
            **spread("service_ttft", self.service_ttft),
            **spread("ttft", self.ttft),
            "prefill_share": self.prefill_share,
            "prefill_seconds": self.gpu.prefill,
            "decode_seconds": self.gpu.decode,
            "idle_seconds": self.gpu.idle,
            "simulated_seconds": self.gpu.now,
            "output_tokens_per_second": share(self.output_tokens, self.gpu.now),
        }


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles of some seconds; a quantile is one of them. 0 for none."""
    ordered, count = sorted(seconds), len(seconds)
    mean = sum(ordered) / count if ordered else 0.0
    quantiles = {
        f"{name}_{which}": ordered[-1 - above(which, count)] if ordered else 0.0
        for which in QUANTILES
    }
    return {f"{name}_mean": mean, **quantiles}


def above(which: str, count: int) -> int:
    """How many of `count` values, at least one, lie behind this quantile of them."""
    return count - 1 - min(count - 1, int(QUANTILES[which] * count))
