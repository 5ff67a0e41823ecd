"""Audits of conversations that leave and return: what is right passes, and disturbs nobody."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.audits import ALL, audit_all, below, leave, server
from support.core import Core, Once, run_in_child
from support.disk_store import Faults, open_with


def prompt(seed: int, length: int) -> list[int]:
    """Of replies in 16 bits that have no near tie: of some forms the rest of a block that is not
    stored is computed again, which rounds otherwise."""
    return random.Random(seed).choices(range(3, 900), k=length)


def talks(core: Core, after_each: Callable[[], object]) -> list[list[int]]:
    """Replies of two conversations, in turns."""
    histories, replies = [prompt(1, 200), prompt(2, 90)], []
    for turn in range(3):
        for number, history in enumerate(histories):
            replies.append(core.ask(history, 24, salt=f"{number}").tokens)
            history += [*replies[-1], *prompt(10 * turn + number, 17)]
            after_each()
    return replies


def undisturbed(form: str, dtype: str) -> list[list[int]]:
    """By a server that never evicts."""
    return talks(server(form, "--hc-audit", "0", dtype=dtype), lambda: None)


WAYS = [("kv", "float32"), ("hidden", "float32"), ("hidden:2,kv:2", "bfloat16")]


def soak(form: str, dtype: str, tier: str, folder: str) -> tuple:
    core = server(form, *ALL, *below(tier, folder), dtype=dtype)

    def between() -> None:
        leave(core, tier)
        audit_all(core)

    return talks(core, between), core.tree.stats()


@pytest.mark.parametrize("tier", ["host", "disk", "remote"])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_right_blocks_pass(once: Once, tmp_path: Path, way: tuple[str, str], tier: str) -> None:
    replies, stats = run_in_child(soak, *way, tier, str(tmp_path / "d"))
    assert replies == once(undisturbed, *way)
    assert stats["audited_blocks"] >= 8
    assert "audit_differences" not in stats


def killed(form: str, dtype: str, folder: str, what: str, count: int) -> None:
    """The server dies within its read or write of this number."""
    calls = itertools.count(1)

    def die(path: str) -> None:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)

    open_with(Faults(**{f"on_{what}": die}))
    core = server(form, *below("disk", folder), dtype=dtype)
    talks(core, lambda: leave(core, "disk"))


@pytest.mark.parametrize("way", WAYS[1:], ids="-".join)
def test_right_blocks_pass_after_servers_were_killed_in_reads_and_writes(
    once: Once, tmp_path: Path, way: tuple[str, str]
) -> None:
    folder = str(tmp_path / "d")
    for what, count in (("write", 1), ("write", 4), ("read", 2), ("write", 2)):
        with pytest.raises(AssertionError, match="died"):
            run_in_child(killed, *way, folder, what, count)
    replies, stats = run_in_child(soak, *way, "disk", folder)
    assert replies == once(undisturbed, *way)
    assert stats["audited_blocks"] > 0 and "audit_differences" not in stats
    assert not {"disk_read_damaged", "disk_read_io_error"} & stats.keys()
    assert not list((tmp_path / "d" / "sglang-hc" / "new").iterdir()), "what they left is gone"
