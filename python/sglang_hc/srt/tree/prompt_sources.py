"""Where the state of each prompt came from: the device, host memory, disk, a remote store, or the
model, which computed it.

SGLang keeps three numbers for a request: cached on the device, in host memory, and below. Which
tier below it was is known of the blocks when they are restored, and noted with the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.metrics import PROMPT_TOKENS
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import answer_of, tree_of
from sglang_hc.tree.block_tree import BlockNode

NOTED = "hc_restored_from"
"""Attribute of a request: (tier, tokens) of what was restored for it, in the order of its path."""


PARTS = "hc_stored_parts"
"""Attribute of a request: what `cached_tokens_details` says of it beside SGLang's own."""


def tokens_by_tier(
    path: Sequence[BlockNode], start: int, stop: int
) -> Iterator[tuple[SourceTier, int]]:
    """Of each block of a path that has some of the tokens [start, stop): where it came from, and
    how many."""
    for block in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
        begin, end = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        yield path[block].source, min(stop, end) - max(start, begin)


class PromptSources:
    """Counts tokens of prompts by source when SGLang tells their client that the request is over.
    So they add up to the prompt tokens of all replies, which SGLang counts as
    `prompt_tokens_total`. Belongs to the scheduler thread.

    below: the tier of a block that is not known to be of another one, None where there is no tier
    below host memory."""

    def __init__(self, below: SourceTier | None) -> None:
        self._below = below
        self.has_below = below is not None
        self.counts: Counter[str] = Counter({f"prompt_tokens_{s}": 0 for s in PROMPT_TOKENS.values})

    def restored(self, req: Any, path: Sequence[BlockNode], start: int, stop: int) -> None:
        """Tokens [start, stop) of a request are restored from blocks of its path."""
        if self._below is None or fields.was_retracted(req):
            return
        # A request that has its row goes on between two chunks; another one may have been refused.
        runs = list(getattr(req, NOTED, ())) if fields.row_of(req) is not None else []
        for tier, tokens in tokens_by_tier(path, start, stop):
            if runs and runs[-1][0] is tier:
                runs[-1] = tier, runs[-1][1] + tokens
            else:
                runs.append((tier, tokens))
        setattr(req, NOTED, runs)

    def below(self, req: Any) -> dict[SourceTier, int]:
        """Of the tokens that SGLang counts as stored below host memory, how many came from each
        tier there. They are the last ones that were restored."""
        *_, left = fields.cached_by_source(req)
        found = {SourceTier.DISK: 0, SourceTier.REMOTE: 0}
        known = self._below or SourceTier.DISK
        for tier, tokens in reversed(getattr(req, NOTED, ())):
            found[known if tier is SourceTier.HOST else tier] += min(tokens, left)
            left -= min(tokens, left)
        found[known] += left
        return found

    def over(self, req: Any) -> None:
        """The client of a request is told that it is over."""
        if fields.is_probe(req):
            return
        prompt = fields.prompt_tokens(req)
        had = min(prompt, fields.committed_tokens(req))
        device, host, stored = fields.cached_by_source(req)
        below = self.below(req)
        counts = self.counts
        counts["prompt_tokens_device"] += device
        counts["prompt_tokens_host"] += host
        counts["prompt_tokens_disk"] += below[SourceTier.DISK]
        counts["prompt_tokens_remote"] += below[SourceTier.REMOTE]
        counts["prompt_tokens_computed"] += had - device - host - stored
        counts["prompt_tokens_aborted"] += prompt - had


def told(result: dict[str, Any] | None, self: Any, req: Any) -> dict[str, Any] | None:
    """AFTER SchedulerOutputStreamer.get_cached_tokens_details, which is asked once for each part of
    a reply, often of one token: beside `storage`, which is their sum, `disk` and `remote`. With the
    last part the prompt is counted."""
    parts: dict[str, int] | None = getattr(req, PARTS, None)
    if parts is None or fields.is_last_part(req):
        tree = tree_of(self)
        if tree is None:
            return result
        parts = answer_of("told", tree, partial(_told, tree.reporting.prompts, req)) or {}
    if parts and result is not None and "storage" in result:
        result.update(parts)
    return result


def _told(prompts: PromptSources, req: Any) -> dict[str, int]:
    if fields.is_last_part(req):
        prompts.over(req)
    parts = {}
    if prompts.has_below:
        parts = {tier.value: tokens for tier, tokens in prompts.below(req).items()}
    setattr(req, PARTS, parts)
    return parts
