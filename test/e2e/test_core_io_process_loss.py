"""The I/O process is lost under SGLang's real scheduler: that costs cache, no request, no token."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.capture.saving import STRAIGHT_ROWS
from sglang_hc.store.process import supervisor as io_supervisor
from sglang_hc.store.process.supervisor import IoSupervisor
from support.core import Core, run_in_child
from support.waiting import until

FLAGS = ("--hc-io", "process", "--max-total-tokens", "640", "--dtype", "float32")
PROMPT = random.Random(3).choices(range(3, 900), k=200)
LENGTH = 260
"""Tokens of a prompt and its reply."""
FEW = STRAIGHT_ROWS - 1
"""Tokens of a prompt whose rows wait in a snapshot, as those of a reply do."""
FOLLOW = random.Random(4).choices(range(3, 900), k=20)
FORM = "hidden:2,kv:2"


def start(directory: str) -> Core:
    io_supervisor.FIRST_BACKOFF_S = io_supervisor.LONGEST_BACKOFF_S = 0.1
    disk = ("--hc-disk", f"{directory}:1", "--hc-host-size-gb", "0.2")
    return Core("--hc-forms", FORM, *disk, *FLAGS)


def supervisor_of(core: Core) -> IoSupervisor:
    return core.tree.tiers.capture.scatters.executor.supervisor


def pid_of(core: Core) -> int:
    pid = supervisor_of(core).pid
    assert pid is not None
    return pid


def wait_for(core: Core, what: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Poll as the scheduler does, until the statistics say so."""
    seen = core.tree.stats
    until(lambda: what(seen()), core.tree.tiers.poll, pause=0.005, show=seen)
    return core.tree.stats()


def undisturbed(start: int = len(PROMPT)) -> tuple[list[int], list[int]]:
    """A server that never stopped, never evicted and lost nothing."""
    core = Core("--hc-forms", FORM, "--max-total-tokens", "640", "--dtype", "float32")
    first = core.ask(PROMPT[:start], LENGTH - start).tokens
    return first, core.ask([*PROMPT[:start], *first, *FOLLOW], 24).tokens


@pytest.fixture(scope="module")
def wanted(models: None) -> tuple[list[int], list[int]]:
    return run_in_child(undisturbed)


def stop(core: Core) -> None:
    """The I/O process, which was running, stands still when this returns."""
    os.kill(pid_of(core), signal.SIGSTOP)
    os.waitpid(pid_of(core), os.WUNTRACED)


def silence(core: Core) -> None:
    """The I/O process, which stands still, has said nothing for as long as makes a hang."""
    supervisor_of(core)._clock = lambda: time.monotonic() + io_supervisor.HANG_S


def kill(core: Core) -> None:
    os.kill(pid_of(core), signal.SIGKILL)


def lost_in_mid_prefetch(directory: str, lose: Callable[[Core], None]) -> tuple:
    core = start(directory)
    first = core.ask(PROMPT, 60).tokens
    core.settle()
    assert core.scheduler.flush_cache()  # only the disk knows it now
    history = [*PROMPT, *first, *FOLLOW]
    stop(core)  # so that the reads are surely under way
    rid = core.submit(history, 24)
    core.run(steps=3)
    assert core.tree.stats()["prefetches"] == 1 and core.tree.tiers.disk.coming
    lose(core)
    core.run()
    reply = core.reply(rid)
    lost = wait_for(core, lambda stats: stats.get("io_restarts"))
    core.settle()
    assert core.scheduler.flush_cache()
    return first, reply, lost, core.ask(history, 24)


def test_killed_while_it_reads(models: None, tmp_path: Path, wanted: tuple) -> None:
    first, reply, lost, after = run_in_child(lost_in_mid_prefetch, str(tmp_path / "d"), kill)
    assert (first, reply.tokens) == wanted
    assert reply.cached == 0, "computed again"
    assert lost["disk_read_lost"] == 4 and lost["io_losses"] == 1
    assert after.tokens == wanted[1] and after.storage == 256, "the disk is back"


def test_hung_while_it_reads(models: None, tmp_path: Path, wanted: tuple) -> None:
    """Nothing comes and nothing dies: the process is killed for it, the request goes on."""
    first, reply, lost, after = run_in_child(lost_in_mid_prefetch, str(tmp_path / "d"), silence)
    assert (first, reply.tokens) == wanted and reply.cached == 0
    assert lost["io_losses"] == 1
    assert after.tokens == wanted[1] and after.storage == 256


def lost_in_mid_save(directory: str, write: bool) -> tuple:
    """Lost while it files the first turn, or, with `write`, while it writes its blocks to disk."""
    core, prompt = start(directory), PROMPT if write else PROMPT[:FEW]
    stop(core)
    first = core.ask(prompt, LENGTH - len(prompt)).tokens
    while write and not core.tree.tiers.disk.busy:
        os.kill(pid_of(core), signal.SIGCONT)
        time.sleep(0.05)  # it files and answers; nobody listens yet
        stop(core)
        core.tree.tiers.poll()
    kill(core)
    lost = wait_for(core, lambda stats: stats.get("io_restarts"))
    core.settle()
    history = [*prompt, *first, *FOLLOW]
    second = core.ask(history, 24).tokens
    core.flood(random.Random(1), 2000)
    third = core.ask(history, 24)
    core.settle()
    assert core.scheduler.flush_cache()
    return first, second, third, lost, core.ask(history, 24)


@pytest.mark.parametrize("write", [False, True])
def test_killed_while_it_saves(models: None, tmp_path: Path, write: bool, wanted: tuple) -> None:
    if not write:
        wanted = run_in_child(undisturbed, FEW)
    first, second, third, lost, last = run_in_child(lost_in_mid_save, str(tmp_path / "d"), write)
    assert (first, second, third.tokens, last.tokens) == (*wanted, wanted[1], wanted[1])
    assert lost["io_lost_operations"] > 0
    if write:
        assert lost["disk_write_lost"] > 0
        assert third.host > 0, "what was scattered is in memory still"
    else:
        assert lost["scatter_failed"] > 0
        assert last.storage > 0, "saved again once it was back"


def chat(core: Core, rng: random.Random) -> list[list[int]]:
    """Four conversations in turns; now and then everything but the disk is forgotten."""
    chats = [[rng.randrange(3, 900) for _ in range(rng.randrange(70, 200))] for _ in range(4)]
    replies = []
    for turn in range(16):
        talk = chats[turn % 4]
        replies.append(core.ask(talk, 12).tokens)
        talk += replies[-1] + [rng.randrange(3, 900) for _ in range(5)]
        if rng.random() < 0.3:
            core.settle()
            assert core.scheduler.flush_cache()
    return replies


def killed_at_random(directory: str, seed: int) -> tuple:
    core = start(directory)
    moments = sorted(random.Random(seed + 100).sample(range(150), 3))
    poll, polls, kills = core.tree.tiers.poll, itertools.count(), itertools.count()

    def poll_or_kill() -> None:
        if moments and next(polls) >= moments[0]:
            del moments[0]
            core.tree.tiers.poll = poll
            back = next(kills)
            wait_for(core, lambda stats: stats.get("io_restarts", 0) == back)
            core.tree.tiers.poll = poll_or_kill
            kill(core)
        poll()

    core.tree.tiers.poll = poll_or_kill
    replies = chat(core, random.Random(seed))
    core.tree.tiers.poll = poll
    assert not moments, "the conversations were over too soon"
    stats = wait_for(core, lambda stats: stats.get("io_restarts") == 3)
    first = core.ask(PROMPT, 12)
    core.settle()
    assert core.scheduler.flush_cache()
    return replies, stats, first, core.ask(PROMPT, 12)


def never_killed(seed: int) -> list[list[int]]:
    core = Core("--max-total-tokens", "4000", "--dtype", "float32", "--hc-forms", "kv")
    return chat(core, random.Random(seed))


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_moments(models: None, tmp_path: Path, seed: int) -> None:
    replies, stats, first, again = run_in_child(killed_at_random, str(tmp_path / "d"), seed)
    assert replies == run_in_child(never_killed, seed)
    assert stats["io_losses"] == stats["io_restarts"] == 3
    assert again.tokens == first.tokens and again.storage == 192, "left alone, it serves as ever"
