"""The disk tier under SGLang's real scheduler: spill, restart, damage, loss."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path

import pytest

from sglang_hc.store.disk.folders import FORMAT_NAME
from sglang_hc.store.disk.opening import make_root
from support.core import Once, run_in_child
from support.disk_store import block_files, spoil_pages
from support.prompts import on_disk
from support.two_servers import (
    PROMPT,
    STORED,
    both_turns,
    first_turn,
    history,
    second_turn,
    server,
)


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_a_new_process_goes_on_from_disk(once: Once, tmp_path: Path, form: str) -> None:
    first, wanted = once(both_turns, form)
    disk = on_disk(tmp_path / "d")
    assert run_in_child(first_turn, form, *disk)[0] == first
    reply, stats = run_in_child(second_turn, form, first, *disk)
    assert reply.storage == STORED == stats["restored_tokens"]
    assert reply.tokens == wanted


def refusal(directory: str) -> tuple[str, list[str]]:
    try:
        server("kv", *on_disk(directory))
    except Exception as error:
        return str(error), traceback.format_exception(error)
    raise AssertionError("it was started")


def test_a_directory_of_another_format_is_refused_in_one_line(models: None, tmp_path: Path) -> None:
    """The message is for users: no walk through SGLang and us behind it."""
    Path(make_root(str(tmp_path)), FORMAT_NAME).write_text("99\n")
    message, shown = run_in_child(refusal, str(tmp_path))
    assert f"--hc-disk {tmp_path}: written in disk format 99" in message
    assert not any("factory.py" in line for line in shown), shown


def killed_turn(*of: str) -> None:
    first_turn(*of)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_loses_nothing_that_was_written(once: Once, tmp_path: Path) -> None:
    first, wanted = once(both_turns, "hidden")
    with pytest.raises(AssertionError, match="died"):
        run_in_child(killed_turn, "hidden", *on_disk(tmp_path / "d"))
    reply, _ = run_in_child(second_turn, "hidden", first, *on_disk(tmp_path / "d"))
    assert reply.storage == STORED
    assert reply.tokens == wanted


def test_damage_is_recomputed(once: Once, tmp_path: Path) -> None:
    first, wanted = once(both_turns, "kv")
    run_in_child(first_turn, "kv", *on_disk(tmp_path / "d"))
    for path in block_files(tmp_path / "d"):
        spoil_pages(path)
    reply, stats = run_in_child(second_turn, "kv", first, *on_disk(tmp_path / "d"))
    assert reply.cached == 0
    assert stats["disk_read_damaged"] >= 1
    assert reply.tokens == wanted


def other_salt(directory: str, first: list[int]) -> tuple[int, int]:
    core = server("kv", *on_disk(directory))
    return core.ask(history(first), 4, salt="other").cached, core.ask(history(first), 4).storage


def test_another_namespace_or_plan_finds_nothing(models: None, tmp_path: Path) -> None:
    first, _ = run_in_child(first_turn, "kv", *on_disk(tmp_path / "d"))
    assert run_in_child(other_salt, str(tmp_path / "d"), first) == (0, STORED)
    reply, _ = run_in_child(second_turn, "hidden", first, *on_disk(tmp_path / "d"))
    assert reply.cached == 0


def flushed(directory: str) -> tuple:
    core = server("hidden", *on_disk(directory))
    told = history(core.ask(PROMPT, 60).tokens)
    core.forget()
    after_flush = core.ask(told, 24)
    core.settle()
    core.tree.clear_storage_backend()
    assert core.scheduler.flush_cache()
    return after_flush, core.ask(told, 24)


def test_flush_keeps_the_disk_and_clear_does_not(models: None, tmp_path: Path) -> None:
    after_flush, after_clear = run_in_child(flushed, str(tmp_path / "d"))
    assert after_flush.storage == STORED
    assert after_clear.cached == 0
    assert after_flush.tokens == after_clear.tokens
