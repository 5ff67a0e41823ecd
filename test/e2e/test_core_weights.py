"""Weights that are changed in a session of SGLang's: nothing saved before its end is served."""

from __future__ import annotations

from support.core import Core, run_in_child
from support.prompts import SMALL, prompt


def in_a_session() -> tuple[int, int, int]:
    """Blocks in host memory before the session, while it is open, and behind its end."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput, EndWeightUpdateReqInput

    core = Core("--hc-forms", "kv", *SMALL)
    updater = core.scheduler.weight_updater

    def kept() -> int:
        core.ask(prompt(2, 200), 8)
        core.push_out()
        core.settle()
        blocks: int = core.tree.stats()["host_blocks"]
        return blocks

    before = kept()
    assert updater.begin_weight_update(BeginWeightUpdateReqInput()).success
    meanwhile = kept()
    assert updater.end_weight_update(EndWeightUpdateReqInput()).success
    core.settle()
    return before, meanwhile, core.tree.stats()["host_blocks"]


def without_a_session() -> tuple[int, int]:
    """Blocks in host memory before and behind an update that SGLang refuses."""
    from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

    core = Core("--hc-forms", "kv", *SMALL)
    core.ask(prompt(2, 200), 8)
    core.settle()
    before = core.tree.stats()["host_blocks"]
    assert not core.scheduler.weight_updater.end_weight_update(EndWeightUpdateReqInput()).success
    core.settle()
    return before, core.tree.stats()["host_blocks"]


def test_an_update_that_changes_nothing_forgets_nothing(models: None) -> None:
    before, behind = run_in_child(without_a_session)
    assert before == behind > 0


def test_the_end_of_a_session_forgets_what_was_saved(models: None) -> None:
    before, meanwhile, behind = run_in_child(in_a_session)
    assert before >= 3 and meanwhile >= before and behind == 0
