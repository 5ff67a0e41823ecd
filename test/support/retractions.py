"""Requests that SGLang retracts every few passes, as it does when the pool is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from support.core import Core
from support.prompts import prompt

NEW = 40
"""Tokens of each reply."""

EVERY = 12
"""Passes between two retractions, of one token each."""


PROMPTS = [prompt(i, 60 + 10 * i) for i in range(3)]


class Computed:
    """Tokens that were computed for requests which came back."""

    def __init__(self, core: Core) -> None:
        self.again = 0
        self._run = core.scheduler.run_batch
        core.scheduler.run_batch = self._run_batch

    def _run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_extend():
            decode = set(batch.decoding_reqs or ())
            self.again += sum(
                count
                for req, count in zip(batch.reqs, batch.extend_lens, strict=True)
                if req.retracted_stain and req not in decode
            )
        return self._run(batch, *args, **kwargs)


def retract_often(every: int = EVERY) -> None:
    """In this process. SGLang reads SGLANG_TEST_RETRACT at import, which was before it began."""
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, every


def serve(
    core: Core, prompts: Sequence[Any] = PROMPTS,
    submit: Callable[[Core, Any, int], str] = Core.submit,
) -> dict[str, Any]:  # fmt: skip
    """The replies to prompts at once, whose state leaves the device at each retraction; and what
    was counted. submit: hands in a prompt that gets so many tokens, and returns its id."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    computed, generated, seen = Computed(core), [0], dict[Any, int]()

    def settle(_: int) -> None:
        for req in core.scheduler.waiting_queue:
            if req.retraction_count > seen.get(req, 0):
                seen[req] = req.retraction_count
                generated[0] += len(req.output_ids)
                core.tree.tiers.drain()  # what it left is saved before its turn
                core.tree.evict(EvictParams(num_tokens=core.scheduler.max_total_num_tokens))

    rids = [submit(core, tokens, NEW) for tokens in prompts]
    core.run(each_pass=settle)
    core.settle()
    return {
        "replies": [core.reply(rid).tokens for rid in rids],
        "retractions": sum(req.retraction_count for req in core.arrived),
        "generated": generated[0],
        "again": computed.again,
        "stats": core.tree.stats(),
    }
