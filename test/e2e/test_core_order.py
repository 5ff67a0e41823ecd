"""Every access to shared device memory is ordered, by streams and events, under SGLang's scheduler.

Two requests run and more wait, so a row of the slot table gets its next owner at once. Then the
conversations leave the device and come back. `support/ordered_core.py` says what is compared and
how. The controls bring back mistakes that were made once or are easily made: a checker that does
not find them is blind.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import run_in_child
from support.during import When
from support.meetings import HeldDisk, halving_profile, second_turn, start
from support.ordered_core import OrderedCore
from support.prompts import prompt
from support.versions import new_version

POOL = 640
FLAGS = (
    *("--hc-host-size-gb", "0.03", "--max-total-tokens", str(POOL), "--dtype", "float32"),
    *("--max-running-requests", "2"),
)
SERIAL = "--disable-overlap-schedule"
OFFLOAD = ("--hc-offload-gb", "1")


def old_commit(core: OrderedCore) -> None:
    """The row of the slot table is read on the forward stream, behind the batch that is under way:
    SGLang has given the row to the next request by then."""
    tree = core.tree

    def commit(req: Any, tokens: Any, length: int, final: bool) -> bytes:
        packed = pack_tokens(tokens[:length])
        with tree.compute_stream.entered():
            slots = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
            tree.tiers.capture.commit(
                req.rid, Prefix(req.extra_key, packed), slots.long(), final=final
            )
        return packed

    tree.commit = commit


def forward_stream_always(core: OrderedCore) -> None:
    """The tiers work on the forward stream while the model runs on the schedule stream."""
    core.tree.compute_stream.forward = core.scheduler.tp_worker.model_runner.forward_stream


def schedule_stream_always(core: OrderedCore) -> None:
    """The tiers work on whichever stream is current."""
    core.tree.compute_stream.entered = contextlib.nullcontext


def allocator_not_told(core: OrderedCore) -> None:
    """Memory made on the schedule stream and read on the forward stream is freed too early."""
    core.tree.compute_stream.will_read = lambda *made: None


def taps_not_joined(core: OrderedCore) -> None:
    """The model goes on beside the copies of its hidden states."""
    core.tree.tiers.capture.taps.branch.join = lambda: None


def weights_not_waited_for(core: OrderedCore) -> None:
    """A layer computes while its weights come."""
    core.model_state.weights.ring._copy_stream.before_compute = lambda event: None


def weights_come_too_early(core: OrderedCore) -> None:
    """They come into a place with which the device has yet to compute."""
    core.model_state.weights.ring._copy_stream.after = lambda computed: None


def forget_at_once(core: OrderedCore) -> None:
    """New weights: stages are dropped on the schedule stream while requests run."""
    tree = core.tree
    tree._begin_version = lambda: tree.tiers.begin_version(tree.weights.made)


def served(
    flags: tuple[str, ...],
    beside: bool = False,
    control: Callable[[OrderedCore], None] | None = None,
) -> dict[str, Any]:
    """Five conversations of two turns, all of the first evicted before the second; in between they
    end at a token, while the pass behind it is under way; then new weights while requests run."""
    core = OrderedCore(*FLAGS, *flags, beside=beside)
    if control is not None:
        control(core)
    prompts = [prompt(i, 70 + 10 * i) for i in range(5)]
    first = [core.submit(tokens, 4 + i) for i, tokens in enumerate(prompts)]
    core.run()
    replies = [core.reply(rid).tokens for rid in first]
    told = [[*tokens, *reply] for tokens, reply in zip(prompts, replies, strict=True)]
    for tokens, reply in zip(prompts, replies, strict=True):
        core.submit(tokens, 20, "stops", stop_token_ids=reply[-1:], ignore_eos=False)
    core.run()
    core.settle()
    core.flood(random.Random(1), POOL)
    second = [core.submit([*tokens, *prompt(9, 20)], 4) for tokens in told]
    core.run()
    again = [core.reply(rid) for rid in second]
    core.settle()
    core.submit(prompt(20, 20), 12)
    core.submit(prompt(21, 20), 12)

    def decoding() -> bool:
        running = core.scheduler.running_batch.reqs
        return bool(running) and len(running[0].output_ids) > 4

    decodes = When(decoding, partial(new_version, core))
    core.run(each_pass=decodes)
    assert decodes.called
    core.settle()
    return {
        "races": [str(race) for race in core.watch.races],
        "sites": [race.sites for race in core.watch.races],
        "accesses": core.watch.accesses,
        "host": sum(reply.host for reply in again),
        "stats": core.tree.stats(),
    }


@pytest.mark.parametrize(
    ("flags", "beside"),
    [
        (("--hc-forms", "hidden"), True),
        (("--hc-forms", "recompute:1,hidden:1,kv:2", "--chunked-prefill-size", "64"), False),
        (("--hc-forms", "recompute:1,hidden:1,kv:2", *OFFLOAD), False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("--hc-forms", "kv"), False),
                (("--hc-forms", "recompute:1,hidden:2,kv:1", SERIAL), False),
                (("--hc-forms", "hidden:2,kv:2", SERIAL), True),
            )
        ),
    ],
    ids=lambda value: " ".join(value) if value not in (False, True) else f"beside={value}",
)
def test_no_access_is_unordered(models: None, flags: tuple[str, ...], beside: bool) -> None:
    seen = run_in_child(served, flags, beside)
    assert not seen["races"], "\n".join(seen["races"])
    assert seen["host"] > 300, "hardly anything was restored"
    wanted = {"slot table", "host pool", "ring", "KV pool, layer 3, part 1", "frame"}
    if OFFLOAD[0] in flags:
        wanted |= {"weights in place 0", "weights in place 1"}
    assert wanted <= seen["accesses"].keys()


@pytest.mark.parametrize(
    ("control", "flags", "region"),
    [
        (old_commit, ("--hc-forms", "kv"), "slot table"),
        (schedule_stream_always, ("--hc-forms", "kv"), "KV pool"),
        (taps_not_joined, ("--hc-forms", "hidden"), "taps"),
        (weights_not_waited_for, ("--hc-forms", "hidden", *OFFLOAD), "weights in place"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (forward_stream_always, ("--hc-forms", "recompute:1,kv:3", SERIAL), "KV pool"),
                (allocator_not_told, ("--hc-forms", "kv"), "made in"),
                (forget_at_once, ("--hc-forms", "hidden"), "snapshot"),
                (weights_come_too_early, ("--hc-forms", "kv", *OFFLOAD), "weights in place"),
            )
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_checker_sees(
    models: None, control: Callable[[OrderedCore], None], flags: tuple[str, ...], region: str
) -> None:
    seen = run_in_child(served, flags, False, control)
    found = [sites for sites in seen["sites"] if sites[0].startswith(region)]
    assert found, f"found elsewhere: {seen['races']}"


def met(folder: str, control: Callable[[OrderedCore], None] | None = None) -> dict[str, Any]:
    """A request meets its history while another one decodes."""
    profile = halving_profile(Path(folder), 6e-3)  # slow enough that computing pays beside others
    core, first = start("hidden", f"{folder}/d", profile, kind=OrderedCore)
    assert isinstance(core, OrderedCore)
    if control is not None:
        control(core)
    disk = HeldDisk(core)
    disk.left = 0
    core.submit(prompt(5, 40), 60)

    def arrive(number: int) -> None:
        disk.left = (disk.left or 0) + (number % 3 == 0)
        if number == 6:
            core.submit(second_turn(first), 4)

    core.run(each_pass=arrive)
    return {
        "races": [str(race) for race in core.watch.races],
        "sites": [race.sites for race in core.watch.races],
        "met": core.tree.stats().get("meetings_restored", 0),
    }


def test_no_access_is_unordered_when_a_running_request_goes_on_behind_its_history(
    models: None, tmp_path: Path
) -> None:
    seen = run_in_child(met, str(tmp_path))
    assert not seen["races"], "\n".join(seen["races"])
    assert seen["met"] == 1


def test_the_checker_sees_a_meeting_beside_the_models_stream(models: None, tmp_path: Path) -> None:
    seen = run_in_child(met, str(tmp_path), schedule_stream_always)
    assert any(sites[0].startswith("snapshot") for sites in seen["sites"]), seen["races"]
