"""What of SGLang goes with models that have recurrent layers: how it keeps their states.

A path can be continued where there is a state. SGLang keeps the last one of each prefill at a
multiple of 64 tokens, and one each time that a reply passes a multiple of `--mamba-track-interval`.
Its 256 would cost a returning turn up to 255 tokens of the reply before; a state for each block
costs 63 at most, and a copy on the device each 64 steps.
"""

from __future__ import annotations

import logging
from math import lcm
from typing import Any

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.binding.arguments import asked, choose

logger = logging.getLogger(__name__)

STRATEGY = "extra_buffer"
"""SGLang's way to keep states at multiples of 64 tokens, beside those that requests go on with."""

INTERVAL = "mamba_track_interval"


def begin(args: Any) -> None:
    """Before SGLang's choices for a model: have it keep states so, whatever it would choose for a
    schedule without overlap."""
    if asked(args, "mamba_radix_cache_strategy") == "auto" and arguments.can_keep_states(args):
        choose(args, "mamba_radix_cache_strategy", STRATEGY)


def settle(args: Any, config: HcConfig) -> None:
    """Behind SGLang's choices for a model: have it keep states where paths can be continued. Raises
    ConfigError where it cannot. Nothing for a model without recurrent layers."""
    if not asked(args, "uses_mamba_radix_cache"):
        return
    refused = {
        "--pp-size above 1": (asked(args, "pp_size") > 1, "stages were not tested with them"),
        "--hc-overflow reembed": (config.overflow == "reembed", "a state has no tokens that move"),
    }  # fmt: skip
    for what, (wrong, why) in refused.items():
        if wrong:
            raise _refusal(what, why, "leave it out")
    strategy = asked(args, "mamba_radix_cache_strategy")
    if strategy != STRATEGY:
        raise _refusal(
            f"--mamba-radix-cache-strategy {strategy}",
            "it keeps states where requests end, and not where blocks do",
            f"give {STRATEGY}, where SGLang has that for the model",
        )
    if asked(args, INTERVAL) == arguments.default(INTERVAL):
        chosen = lcm(BLOCK_TOKENS, arguments.state_chunk(args))
        choose(args, INTERVAL, chosen)
        logger.info("sglang-hc: --mamba-track-interval %d: states of replies for each end", chosen)


def _refusal(what: str, why: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"sglang-hc does not support {what} with recurrent layers yet: {why}; {remedy}, or add "
        "--hc-disable to serve without the tiers"
    )
