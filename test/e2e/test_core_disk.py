"""The disk tier under SGLang's real scheduler: spill, restart, clearing."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store.disk.folders import FORMAT_NAME
from sglang_hc.store.disk.opening import make_root
from support.core import Once, Reply, run_in_child
from support.disk_store import store_of
from support.prompts import in_directory, on_disk
from support.two_servers import (
    PROMPT,
    STORED,
    both_turns,
    first_turn,
    history,
    second_turn,
    server,
)
from support.waiting import until


def killed_turn(*of: str) -> None:
    first_turn(*of)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_a_new_process_goes_on_where_one_was_killed(once: Once, tmp_path: Path, form: str) -> None:
    first, wanted = once(both_turns)
    disk = on_disk(tmp_path / "d")
    with pytest.raises(AssertionError, match="died"):
        run_in_child(killed_turn, form, *disk)
    reply, stats = run_in_child(second_turn, form, first, *disk)
    assert reply.storage == STORED == stats["restored_tokens"]
    assert reply.tokens == wanted


def turn_of_another_sglang(*of: str) -> None:
    import sglang

    os.environ["SGLANG_HC_ANY_SGLANG"] = "1"
    sglang.__version__ = "0.5.17"
    first_turn(*of)


def test_what_another_sglang_computed_is_not_served(once: Once, tmp_path: Path) -> None:
    """Its kernels may round elsewhere. The server itself finds it, as above."""
    first, wanted = once(both_turns)
    disk = on_disk(tmp_path / "d")
    run_in_child(turn_of_another_sglang, "kv", *disk)
    reply, stats = run_in_child(second_turn, "kv", first, *disk)
    assert reply.cached == 0 and "restored_tokens" not in stats
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


def written_by_turns(*below: str) -> list[int]:
    core = server("kv", *below, "--hc-write", "second-use")
    first = core.ask(PROMPT, 60).tokens
    core.settle()
    before = core.tree.stats()
    core.ask(history(first), 24)
    core.settle()
    return [stats.get("disk_saved_blocks", 0) for stats in (before, core.tree.stats())]


@pytest.mark.slow
def test_a_turn_that_comes_back_is_written(models: None, tmp_path: Path) -> None:
    counts = run_in_child(written_by_turns, *on_disk(tmp_path))
    assert counts == [0, STORED // BLOCK_TOKENS]


def flushed(*below: str) -> tuple[list[int], Reply, Reply]:
    core = server("hidden", *below)
    first = core.ask(PROMPT, 60).tokens
    told = history(first)

    def clear() -> None:
        core.settle()
        ended: list[bool] = []
        core.tree.clear_storage_backend(ended.append)
        until(lambda: core.run(1) or ended)
        assert ended == [True] and store_of(core).block_ids() == []
        assert core.scheduler.flush_cache()

    core.forget()
    after_flush = core.ask(told, 24)
    clear()
    after_clear = core.ask(told, 24)
    clear()
    return first, after_flush, after_clear


@pytest.mark.parametrize("below", [on_disk, in_directory])
def test_flush_keeps_what_is_below_and_clear_does_not(
    models: None, tmp_path: Path, below: Callable[[object], tuple[str, ...]]
) -> None:
    """Neither for this server nor for the next one."""
    first, after_flush, after_clear = run_in_child(flushed, *below(tmp_path))
    next_server, _ = run_in_child(second_turn, "hidden", first, *below(tmp_path))
    assert (after_flush.storage, after_clear.cached, next_server.cached) == (STORED, 0, 0)
    assert after_flush.tokens == after_clear.tokens == next_server.tokens
