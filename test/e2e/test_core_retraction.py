"""What a retracted request generated comes back from the tiers, counted in tokens.

SGLang's scheduler takes the slots of a request that decodes and queues it again, as it does when
the pool is full; here it does so every few passes.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.core import Core, Once, run_in_child
from support.prompts import SMALL, prompt

NEW = 40
"""Tokens of each reply."""

EVERY = 12
"""Passes between two retractions."""


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


def serve(retract: bool, form: str, flags: tuple[str, ...]) -> dict[str, Any]:
    from sglang.srt.managers import scheduler
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    # SGLang reads SGLANG_TEST_RETRACT at import, which was before this process began.
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = retract, EVERY
    core = Core("--hc-forms", form, *SMALL, *flags)
    computed, generated, seen = Computed(core), [0], dict[Any, int]()

    def settle(_: int) -> None:
        for req in core.scheduler.waiting_queue:
            if req.retraction_count > seen.get(req, 0):
                seen[req] = req.retraction_count
                generated[0] += len(req.output_ids)
                core.tree.tiers.drain()  # what it left is saved before its turn
                core.tree.evict(EvictParams(num_tokens=core.scheduler.max_total_num_tokens))

    rids = [core.submit(tokens, NEW) for tokens in PROMPTS]
    core.run(each_pass=settle)
    core.settle()
    return {
        "replies": [core.reply(rid).tokens for rid in rids],
        "retractions": sum(req.retraction_count for req in core.arrived),
        "generated": generated[0],
        "again": computed.again,
        "stats": core.tree.stats(),
    }


@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("hidden", ()),
        ("kv", ()),
        ("hidden:2,kv:2", ("--disable-overlap-schedule",)),
        ("recompute:1,hidden:1,kv:2", ("--chunked-prefill-size", "64", "--enable-mixed-chunk")),
    ],
    ids=["hidden", "kv", "plain", "mixed chunks"],
)
def test_what_was_generated_is_not_computed_again(
    once: Once, form: str, flags: tuple[str, ...]
) -> None:
    calm = once(serve, False, "kv", ())
    assert calm["retractions"] == 0
    found = run_in_child(serve, True, form, flags)
    stats = found["stats"]
    assert found["replies"] == calm["replies"]
    assert found["retractions"] > 0 and found["generated"] > 40
    assert found["again"] <= 2 * found["retractions"], "the last token, whose logits are needed"
    back, had = stats["retracted_restored_tokens"], stats["retracted_tokens"]
    assert had - found["retractions"] <= back <= had, "nothing of it was left on the device"
    assert had > found["generated"] - found["retractions"]
    assert stats["host_staged_slots"] == 0
