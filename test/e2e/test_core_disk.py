"""The disk tier under SGLang's real scheduler: spill, restart, damage, loss."""

from __future__ import annotations

import os
import random
import signal
import traceback
from pathlib import Path

import pytest

from sglang_hc.store.disk.folders import FORMAT_NAME, model_folders, store_root
from sglang_hc.store.disk.opening import make_root
from support.core import Core, run_in_child

POOL = 640
FLAGS = ("--max-total-tokens", str(POOL), "--dtype", "float32", "--hc-host-size-gb", "0.2")
PROMPT = random.Random(3).choices(range(3, 900), k=200)
FOLLOW = random.Random(4).choices(range(3, 900), k=20)


def first_turn(form: str, directory: str) -> list[int]:
    core = Core("--hc-forms", form, "--hc-disk", f"{directory}:1", *FLAGS)
    reply = core.ask(PROMPT, 60)
    core.settle()
    return reply.tokens


def second_turn(form: str, directory: str, history: list[int]) -> tuple:
    core = Core("--hc-forms", form, "--hc-disk", f"{directory}:1", *FLAGS)
    reply = core.ask(history, 24)
    core.settle()
    return reply, core.tree.stats()


def both_turns(form: str) -> tuple[list[int], list[int]]:
    """A server that never stopped and never evicted."""
    core = Core("--hc-forms", form, *FLAGS)
    first = core.ask(PROMPT, 60).tokens
    return first, core.ask([*PROMPT, *first, *FOLLOW], 24).tokens


@pytest.mark.parametrize("form", ["hidden", "kv", "hidden:2,kv:2"])
def test_a_new_process_goes_on_from_disk(models: None, tmp_path: Path, form: str) -> None:
    first, wanted = run_in_child(both_turns, form)
    assert run_in_child(first_turn, form, str(tmp_path / "d")) == first
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats = run_in_child(second_turn, form, str(tmp_path / "d"), history)
    assert reply.storage == 256 == stats["restored_tokens"]  # all full blocks of 260 tokens
    assert reply.tokens == wanted


def refusal(directory: str) -> tuple[str, list[str]]:
    try:
        Core("--hc-forms", "kv", "--hc-disk", f"{directory}:1", *FLAGS)
    except Exception as error:
        return str(error), traceback.format_exception(error)
    raise AssertionError("it was started")


def test_a_directory_of_another_format_is_refused_in_one_line(models: None, tmp_path: Path) -> None:
    """The message is for users: no walk through SGLang and us behind it."""
    Path(make_root(str(tmp_path)), FORMAT_NAME).write_text("99\n")
    message, shown = run_in_child(refusal, str(tmp_path))
    assert f"--hc-disk {tmp_path}: written in disk format 99" in message
    assert not any("factory.py" in line for line in shown), shown


def killed_turn(form: str, directory: str) -> None:
    core = Core("--hc-forms", form, "--hc-disk", f"{directory}:1", *FLAGS)
    core.ask(PROMPT, 60)
    core.settle()
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_loses_nothing_that_was_written(models: None, tmp_path: Path) -> None:
    first, wanted = run_in_child(both_turns, "hidden")
    with pytest.raises(AssertionError, match="died"):
        run_in_child(killed_turn, "hidden", str(tmp_path / "d"))
    reply, _ = run_in_child(second_turn, "hidden", str(tmp_path / "d"), [*PROMPT, *first, *FOLLOW])
    assert reply.storage == 256
    assert reply.tokens == wanted


def test_damage_is_recomputed(models: None, tmp_path: Path) -> None:
    first, wanted = run_in_child(both_turns, "kv")
    run_in_child(first_turn, "kv", str(tmp_path / "d"))
    rng = random.Random(0)
    (folder,) = model_folders(store_root(str(tmp_path / "d")))
    for path in map(Path, map(folder.block_path, folder.block_ids())):
        with path.open("r+b") as file:
            for position in range(0, folder.file_bytes, 4096):
                file.seek(position + rng.randrange(4096))
                file.write(b"\xa5")
    reply, stats = run_in_child(second_turn, "kv", str(tmp_path / "d"), [*PROMPT, *first, *FOLLOW])
    assert reply.cached == 0
    assert stats["disk_read_damaged"] >= 1
    assert reply.tokens == wanted


def other_salt(directory: str, history: list[int]) -> tuple:
    core = Core("--hc-forms", "kv", "--hc-disk", f"{directory}:1", *FLAGS)
    salted = core.ask(history, 4, salt="other")
    plain = core.ask(history, 4)
    return salted.cached, plain.storage


def test_namespaces_are_separate_on_disk(models: None, tmp_path: Path) -> None:
    first = run_in_child(first_turn, "kv", str(tmp_path / "d"))
    history = [*PROMPT, *first, *FOLLOW]
    assert run_in_child(other_salt, str(tmp_path / "d"), history) == (0, 256)


def test_another_plan_finds_nothing(models: None, tmp_path: Path) -> None:
    first = run_in_child(first_turn, "kv", str(tmp_path / "d"))
    history = [*PROMPT, *first, *FOLLOW]
    reply, _ = run_in_child(second_turn, "hidden", str(tmp_path / "d"), history)
    assert reply.cached == 0


def flushed(directory: str) -> tuple:
    core = Core("--hc-forms", "hidden", "--hc-disk", f"{directory}:1", *FLAGS)
    first = core.ask(PROMPT, 60)
    core.settle()
    assert core.scheduler.flush_cache()
    history = [*PROMPT, *first.tokens, *FOLLOW]
    after_flush = core.ask(history, 24)
    core.settle()
    core.tree.clear_storage_backend()
    assert core.scheduler.flush_cache()
    return after_flush, core.ask(history, 24)


def test_flush_keeps_the_disk_and_clear_does_not(models: None, tmp_path: Path) -> None:
    after_flush, after_clear = run_in_child(flushed, str(tmp_path / "d"))
    assert after_flush.storage == 256
    assert after_clear.cached == 0
    assert after_flush.tokens == after_clear.tokens
