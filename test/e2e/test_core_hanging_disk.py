"""A disk that never answers under SGLang's real scheduler: a flush, new weights and a stop go
on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from support.core import MODELS, Core, run_in_child
from support.disk_store import Faults, open_with
from support.prompts import SMALL, on_disk, prompt
from support.waiting import until

PROMPTS = [prompt(seed, 200) for seed in range(3)]


def undisturbed() -> list[list[int]]:
    core = Core("--hc-forms", "kv", *SMALL, "--max-total-tokens", "8000")
    return [core.ask(asked, 16).tokens for asked in PROMPTS]


def quick() -> None:
    """What is waited for in the end is not waited for long."""
    from sglang_hc.queue import prefetch
    from sglang_hc.store import lower_tier
    from sglang_hc.store.disk import threads

    lower_tier.DRAIN_S = prefetch.PATIENCE = 0.5
    threads.PATIENCE = threads.Patience(close_s=0.5)


def in_time(what: Any, *args: Any) -> Any:
    """A call that must come back, on its own thread only to be seen to hang."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(what(*args)), daemon=True)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive(), "it waits for the disk"
    return done[0]


def met(folder: str) -> tuple[list[list[int]], dict[str, Any]]:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

    mark = Path(folder) / "hangs"
    Path(folder).mkdir()

    def hang(path: str) -> None:
        while mark.exists():
            time.sleep(0.01)

    open_with(Faults(hang, on_write=hang))
    core = Core("--hc-forms", "hidden:2,kv:2", *SMALL, *on_disk(folder))
    replies = [core.ask(PROMPTS[0], 16).tokens]
    core.settle()
    assert core.scheduler.flush_cache()
    quick()
    mark.touch()
    replies.append(core.ask(PROMPTS[0], 16).tokens)  # its reads hang
    replies.append(core.ask(PROMPTS[1], 16).tokens)  # and the writes of what it leaves
    assert in_time(core.scheduler.flush_cache)
    withheld = core.tree.stats()
    replies += [core.ask(asked, 16).tokens for asked in PROMPTS]
    request = UpdateWeightFromDiskReqInput(
        model_path=str(MODELS / "llama-mha"), load_format="auto", flush_cache=False
    )
    assert in_time(core.scheduler.weight_updater.update_weights_from_disk, request).success
    replies += [core.ask(asked, 16).tokens for asked in PROMPTS]
    mark.unlink()
    # What came late gives its slots back.
    until(lambda: core.tree.stats()["host_withheld_slots"] == 0, core.tree.tiers.poll)
    replies += [core.ask(asked, 16).tokens for asked in PROMPTS]
    core.tree.tiers.check_integrity()
    mark.touch()
    in_time(core.tree.release_host_resources)
    return replies, withheld


def test_a_disk_that_never_answers_costs_no_flush_and_no_token(
    models: None, tmp_path: Path
) -> None:
    wanted = run_in_child(undisturbed)
    replies, withheld = run_in_child(met, str(tmp_path / "d"))
    assert replies == [wanted[n] for n in (0, 0, 1, *[0, 1, 2] * 3)]
    assert withheld["host_withheld_slots"] > 0
