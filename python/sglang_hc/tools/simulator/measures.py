"""What a simulation counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.simulator.jobs import Job
from sglang_hc.tools.simulator.tiers import Found


@dataclass
class Measures:
    """Sums over the turns after the warm-up.

    A token is hit when its state was in some tier at admission, whether or not restoring it was
    cheaper than recomputing it; `restored` counts those that were restored. A turn is hit when
    every full block of its prompt that was ever stored was found; a session's first turn is none.
    """

    turns: int = 0
    turn_hits: int = 0
    prompt_tokens: int = 0
    reusable: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    restored: int = 0
    simulated_seconds: float = 0.0
    ttft: list[float] = field(default_factory=list, repr=False)
    returning_turns: int = 0

    def admitted(
        self, job: Job, found: Found, reusable: tuple[int, int], restored: int, ttft: float
    ) -> None:
        """One counted turn. reusable: (full blocks, tokens) that an endless cache would find."""
        blocks, tokens = reusable
        self.turns += 1
        self.prompt_tokens += job.prompt_tokens
        # Rows of a block that is equal only in part are found too, but counted by no block.
        self.reusable += max(tokens, found.tokens)
        self.device += found.device
        self.host += found.host
        self.disk += found.disk
        self.restored += restored
        self.ttft.append(ttft)
        if blocks:
            self.returning_turns += 1
            self.turn_hits += found.tokens >= min(blocks * BLOCK_TOKENS, job.prompt_tokens - 1)

    @property
    def hit_tokens(self) -> int:
        return self.device + self.host + self.disk

    def quantile(self, share: float) -> float:
        """TTFT in seconds, waiting included, that `share` of the turns stay under."""
        if not self.ttft:
            return 0.0
        ordered = sorted(self.ttft)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

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
            "ttft_median": self.quantile(0.5),
            "ttft_p90": self.quantile(0.9),
            "simulated_seconds": self.simulated_seconds,
        }
