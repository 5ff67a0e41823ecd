"""What a retracted request generated comes back from the tiers, counted in tokens.

SGLang's scheduler takes the slots of a request that decodes and queues it again, as it does when
the pool is full; here it does so every few passes.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.core import Core, Once, run_in_child
from support.prompts import SMALL
from support.retractions import retract_often, serve


def serve_with(retract: bool, form: str, flags: tuple[str, ...]) -> dict[str, Any]:
    if retract:
        retract_often()
    return serve(Core("--hc-forms", form, *SMALL, *flags))


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
    calm = once(serve_with, False, "kv", ())
    assert calm["retractions"] == 0
    found = run_in_child(serve_with, True, form, flags)
    stats = found["stats"]
    assert found["replies"] == calm["replies"]
    assert found["retractions"] > 0 and found["generated"] > 40
    assert found["again"] <= 2 * found["retractions"], "the last token, whose logits are needed"
    back, had = stats["retracted_restored_tokens"], stats["retracted_tokens"]
    assert had - found["retractions"] <= back <= had, "nothing of it was left on the device"
    assert had > found["generated"] - found["retractions"]
    assert stats["host_staged_slots"] == 0
