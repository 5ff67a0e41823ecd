"""Audits of conversations that leave and return: what is right passes, and disturbs nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.audits import ALL, audit_all, below, leave, server
from support.core import Core, Once, run_in_child


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


def soak(form: str, dtype: str, tier: str, folder: str) -> tuple:
    core = server(form, *ALL, *below(tier, folder), dtype=dtype)

    def between() -> None:
        leave(core, tier)
        audit_all(core)

    return talks(core, between), core.tree.stats()


@pytest.mark.parametrize(
    ("form", "dtype", "tier"),
    [
        ("kv", "float32", "host"),
        ("hidden", "float32", "disk"),
        ("hidden:2,kv:2", "bfloat16", "host"),
        ("hidden:2,kv:2", "bfloat16", "remote"),
    ],
)
def test_right_blocks_pass(once: Once, tmp_path: Path, form: str, dtype: str, tier: str) -> None:
    replies, stats = run_in_child(soak, form, dtype, tier, str(tmp_path / "d"))
    assert replies == once(undisturbed, form, dtype)
    assert stats["audited_blocks"] >= 8
    assert "audit_differences" not in stats
