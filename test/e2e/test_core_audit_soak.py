"""Audits of conversations that leave and return: what is right passes, and disturbs nobody."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hc.store.process import supervisor as io_supervisor
from support.audits import ALL, audit_all, below, leave, prompt, server
from support.core import Core, run_in_child
from support.waiting import until


def talks(core: Core, after_each: Callable[[], object]) -> list[list[int]]:
    """Replies of two conversations, in turns."""
    histories, replies = [prompt(1), prompt(2, 90)], []
    for turn in range(3):
        for number, history in enumerate(histories):
            replies.append(core.ask(history, 24, salt=f"{number}").tokens)
            history += [*replies[-1], *prompt(10 * turn + number, 17)]
            after_each()
    return replies


def undisturbed(form: str, dtype: str) -> list[list[int]]:
    return talks(server(form, "--hc-audit", "0", dtype=dtype), lambda: None)


@pytest.fixture(scope="module")
def stayed(models: None) -> dict[tuple[str, str], list[list[int]]]:
    """Replies of a server that never evicts, by form and type."""
    return {way: run_in_child(undisturbed, *way) for way in WAYS}


WAYS = [("kv", "float32"), ("hidden", "float32"), ("hidden:2,kv:2", "bfloat16")]


def soak(form: str, dtype: str, tier: str, folder: str, kills: bool) -> tuple:
    io_supervisor.FIRST_BACKOFF_S = io_supervisor.LONGEST_BACKOFF_S = 0.1
    flags = ("--hc-io", "process") if kills else ()
    core, turns = server(form, *ALL, *below(tier, folder), *flags, dtype=dtype), itertools.count()

    def between() -> None:
        if not kills or next(turns) % 2:
            leave(core, tier)
        else:  # in the middle of whatever is being saved
            supervisor = core.tree.tiers.capture.scatters.executor.supervisor
            os.kill(supervisor.pid, signal.SIGKILL)
            before = core.tree.stats().get("io_restarts", 0)
            seen = core.tree.stats
            until(lambda: seen().get("io_restarts", 0) > before, core.tree.tiers.poll, show=seen)
            leave(core, "host")
        audit_all(core)

    return talks(core, between), core.tree.stats()


@pytest.mark.parametrize("tier", ["host", "disk", "remote"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_right_blocks_pass(
    models: None, tmp_path: Path, way: tuple[str, str], tier: str, stayed: dict
) -> None:
    replies, stats = run_in_child(soak, *way, tier, str(tmp_path / "d"), False)
    assert replies == stayed[way]
    assert stats["audited_blocks"] >= 8
    assert "audit_differences" not in stats


@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_right_blocks_pass_while_the_io_process_is_killed(
    models: None, tmp_path: Path, way: tuple[str, str], stayed: dict
) -> None:
    replies, stats = run_in_child(soak, *way, "disk", str(tmp_path / "d"), True)
    assert replies == stayed[way]
    assert stats["io_losses"] == 3 and stats["audited_blocks"] > 0
    assert "audit_differences" not in stats
