"""Costs that correct themselves, on a real engine: a wrong profile is unlearned, and `always`.

What the server times is as long as the tests say, on a fast machine and on a busy one.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.correction import BOUND
from support.clock import Clock
from support.core import Core, run_in_child
from support.meetings import HeldDisk
from support.profiles import cost_model, write
from support.prompts import SMALL, on_disk, prompt

POOL = 2048
LAYERS = 4
PREFILL = 1e-4
"""Seconds per token and layer."""
SLOW_LINK = cost_model(host=3 * PREFILL, project=1e-7, prefill=PREFILL, overlap=False)
"""Copying a layer takes a hundredth of computing it."""
SLOW_DISK = cost_model(host=PREFILL / 100, disk=2.5 * PREFILL, prefill=PREFILL, overlap=False)
HOPELESS = cost_model(host=1e3, disk=1e3, project=1.0, prefill=1e-9)


def engine(profile: str, *flags: str) -> Core:
    pool = ("--max-total-tokens", str(POOL))
    return Core("--hc-forms", "kv", *SMALL, *pool, *flags, profile=profile)


def histories(count: int, length: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, 900) for _ in range(length)] for _ in range(count)]


class TimedDisk(HeldDisk):
    """No read comes too late for its request, and each says that it took a hundredth of computing
    its block."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._at: dict[int, float] = {}
        self._took = PREFILL / 100 * LAYERS * BLOCK_TOKENS

    def read(self, ticket: int, *args: Any) -> None:
        begun = max([time.monotonic(), *self._at.values()])
        self._at[ticket] = begun + self._took
        super().read(ticket, *args)

    def poll(self) -> list[Any]:
        return [
            done._replace(at=self._at.pop(done.ticket)) if done.ticket in self._at else done
            for done in super().poll()
        ]


def keep_time(core: Core, prefill: float) -> None:
    """For whoever times prefills and copies only they take time: a layer `prefill` seconds a token,
    its copy a hundredth of PREFILL."""
    clock, observer = Clock(), core.tree.tiers.restorer.observer
    observer.timer.compute = observer.timer.copies = clock
    layers = core.scheduler.tp_worker.model_runner.model.model.layers
    for layer in layers:
        layer.register_forward_pre_hook(lambda _, inputs: clock.pass_time(prefill * len(inputs[0])))
    row = core.tree.tiers.layout.slot_bytes / LAYERS / BLOCK_TOKENS
    copy_stream = core.tree.tiers.restorer.path.copy_stream
    copy = copy_stream.copy

    def timed(target: Any, source: Any) -> None:
        copy(target, source)
        clock.pass_time(PREFILL / 100 * source.numel() * source.element_size() / row)

    copy_stream.copy = timed


def twenty_histories(profile: str) -> tuple[list[int], list[int], dict]:
    """Tokens restored of each of 20 evicted histories of 800 tokens, asked for twice."""
    core = engine(profile)
    keep_time(core, PREFILL / 2)
    asked = histories(20, 800)
    for history in asked:
        core.ask(history, 1)
    core.settle()
    first = [core.ask([*history, 7, 8, 9], 1).host for history in asked]
    again = [core.ask([*history, 17, 18, 19], 1).host for history in asked]
    core.settle()
    return first, again, core.tree.stats()


def test_a_link_that_is_faster_than_its_profile_is_used_within_twenty_requests(
    models: None, tmp_path: Path
) -> None:
    first, again, stats = run_in_child(twenty_histories, write(SLOW_LINK, tmp_path))
    assert min(first) < 800, "the profile refuses"
    assert again == [800] * 20
    assert stats["restore_decision_try"] >= 2 and stats["restore_decision_refuse"] >= 1
    assert stats["cost_corrections"] >= 1
    assert stats["cost_correction_kv_copy"] + 1e-4 >= 1 / BOUND
    assert stats["cost_correction_kv_copy"] < 0.5
    assert stats["cost_observations_kv_copy"] >= 20 and stats["cost_observations_prefill"] >= 20


def served(
    profile: str, directory: str, asked: list[list[int]], slow: bool
) -> tuple[list[int], dict]:
    # Without chunks nothing is computed while the rest is read: it is tried, or not read at all.
    whole = ("--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5")
    core = engine(profile, *on_disk(directory), *whole)
    TimedDisk(core)
    keep_time(core, 2 * PREFILL if slow else PREFILL)
    found = [core.ask([*history, 7, 8, 9], 1).storage for history in asked]
    core.settle()
    return found, core.tree.stats()


def test_a_disk_that_is_faster_than_its_profile_is_read_within_fifty_requests(
    models: None, tmp_path: Path
) -> None:
    profile, disk = write(SLOW_DISK, tmp_path), str(tmp_path / "d")
    asked = histories(60, 260)
    assert run_in_child(served, profile, disk, asked, False)[0] == [0] * 60
    found, stats = run_in_child(served, profile, disk, asked, True)
    assert min(found[:6]) < 256, "the profile refuses"
    assert found[20:] == [256] * 40
    assert stats["prefetch_tries"] >= 2 and stats["prefetch_not_worth"] >= 3
    assert stats["cost_observations_disk"] >= 3
    assert stats["cost_correction_disk"] < 0.5


def one_history(profile: str, directory: str, *flags: str) -> tuple[int, int, dict]:
    core = engine(profile, *on_disk(directory), *flags)
    (history,) = histories(1, 800)
    from_disk = core.ask(history, 1).storage
    core.settle()
    core.flood(random.Random(1), 2 * POOL)
    core.settle()
    from_host = core.ask([*history, 7], 1).host
    return from_disk, from_host, core.tree.stats()


def test_always_restores_what_no_profile_would(models: None, tmp_path: Path) -> None:
    profile, disk = write(HOPELESS, tmp_path), str(tmp_path / "d")
    run_in_child(one_history, profile, disk)
    for restore, hits in (("always", (768, 800)), ("cost", (0, 0))):
        *found, stats = run_in_child(one_history, profile, disk, "--hc-restore", restore)
        assert tuple(found) == hits
        assert ("restore_reason_always" in stats) == (restore == "always")
        assert ("restore_decision_refuse" in stats) == (restore == "cost")


def refusals(profile: str) -> tuple[list[int], int]:
    """Three requests at once, whose 400 tokens in host memory are not worth restoring. Of a pass
    without chunks one alone has room: SGLang selects the next one for what its hit would leave to
    compute, is told that there is none, and sends it back to the queue."""
    whole = ("--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5")
    room = ("--max-total-tokens", "2048", "--max-prefill-tokens", "512")
    core = Core("--hc-forms", "kv", *SMALL, *whole, *room, profile=profile)
    core.believe_profile()
    histories = [prompt(n, 400) for n in range(3)]
    for history in histories:
        core.ask(history, 1)
    core.settle()
    core.evict()
    rids = [core.submit([*history, 7, 8, 9], 1) for history in histories]
    core.run()
    return [core.reply(rid).cached for rid in rids], core.tree.stats()["restore_decision_refuse"]


def test_a_refusal_is_counted_once_for_each_request(models: None, tmp_path: Path) -> None:
    cached, refused = run_in_child(refusals, write(HOPELESS, tmp_path))
    assert cached == [0, 0, 0]
    assert refused == 3
