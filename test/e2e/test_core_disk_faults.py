"""Faults of the disk under SGLang's real scheduler: the same tokens, no failed request, a reason.

One engine meets every fault in turn, each with a conversation of its own: a first turn is saved,
everything but the disk forgets it, and a second turn asks for it again. Afterwards the disk is well
and the conversation is asked for once more.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from support.core import Core, Reply, run_in_child
from support.disk_store import EIO, ENOSPC, Faults, failing, open_with, store_of
from support.prompts import SMALL, on_disk, prompt

FAULTS: dict[str, dict[str, Any]] = {
    "EIO on reads": {"on_read": EIO},
    "short reads": {"short": 512},
    "EIO on writes": {"on_write": EIO},
    "no space": {"on_write": ENOSPC},
    "read-only": {"on_write": failing(errno.EROFS)},
    "1 MB/s": {"bytes_per_second": 1e6},
    "removed": {},
}
"""Fields of `Faults`."""


def talk(core: Core, name: str, between: Callable[[], None]) -> tuple[list[int], Reply]:
    """Two turns with something in between."""
    both = prompt(name, 220)
    first, follow = both[:200], both[200:]
    said = core.ask(first, 30).tokens
    core.settle()
    between()
    return said, core.ask([*first, *said, *follow], 16)


def undisturbed() -> dict[str, tuple[list[int], list[int]]]:
    core = Core("--hc-forms", "kv", *SMALL, "--max-total-tokens", "8000")
    replies = {name: talk(core, name, lambda: None) for name in FAULTS}
    return {name: (said, reply.tokens) for name, (said, reply) in replies.items()}


def meet_faults(folder: str) -> dict[str, tuple]:
    """Per fault: both replies, the reply afterwards, and what was counted."""
    from sglang_hc.queue import prefetch

    faults = Faults()
    open_with(faults)
    core = Core("--hc-forms", "hidden:2,kv:2", *SMALL, *on_disk(folder))
    well, patience = vars(Faults()).copy(), prefetch.PATIENCE

    def forget(then: Callable[[], None] = lambda: None) -> None:
        assert core.scheduler.flush_cache()
        then()

    def set_in(name: str) -> None:
        vars(faults).update(FAULTS[name])
        if name == "1 MB/s":
            prefetch.PATIENCE = 0.1
        if name == "removed":
            shutil.rmtree(folder)

    results = {}
    for name, fields in FAULTS.items():
        before = dict(core.tree.stats())
        if "on_write" in fields:  # while the first turn is saved
            set_in(name)
            said, reply = talk(core, name, forget)
        else:
            said, reply = talk(core, name, partial(forget, then=partial(set_in, name)))
        core.settle()
        after = core.tree.stats()
        vars(faults).update(well)
        store = store_of(core)
        (directory,) = store.directories
        directory.breaker.succeeded()  # its pause is over
        if name == "no space":
            store.evictors[directory].look(count=False)  # as every ten seconds
        prefetch.PATIENCE = patience
        forget()
        again = talk(core, name, forget)[1] if name != "removed" else reply
        counted = {key: value - before.get(key, 0) for key, value in after.items()
                   if isinstance(value, int)}  # fmt: skip
        results[name] = said, reply, again, counted
    return results


@pytest.fixture(scope="module")
def wanted(models: None) -> dict[str, tuple[list[int], list[int]]]:
    return run_in_child(undisturbed)


@pytest.fixture(scope="module")
def met(models: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    return run_in_child(meet_faults, str(tmp_path_factory.mktemp("disk") / "d"))


@pytest.mark.parametrize("name", FAULTS)
def test_the_tokens_are_the_same(wanted: dict, met: dict, name: str) -> None:
    said, reply, again, _ = met[name]
    assert (said, reply.tokens, again.tokens) == (*wanted[name], wanted[name][1])


@pytest.mark.parametrize(
    ("name", "counter"),
    [
        ("EIO on reads", "disk_read_io_error"),
        ("short reads", "disk_read_damaged"),
        ("EIO on writes", "disk_write_io_error"),
        ("no space", "disk_write_no_space"),
        ("read-only", "disk_write_io_error"),
        ("1 MB/s", "prefetch_late"),
    ],
)
def test_the_reason_is_counted_and_the_disk_is_used_again(
    met: dict, name: str, counter: str
) -> None:
    _, reply, again, counted = met[name]
    assert counted[counter] > 0
    assert reply.storage < 192, "not all of it was served from the disk"
    assert again.storage >= 192, "a disk that is well again is used again"
