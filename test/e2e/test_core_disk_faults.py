"""Faults of the disk under SGLang's real scheduler: the same tokens, no failed request, a reason.

One engine meets every fault in turn, each with a conversation of its own: a first turn is saved,
everything but the disk forgets it, and a second turn asks for it again. Afterwards the disk is well
and the conversation is asked for once more.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from functools import partial

import pytest

from support.core import Core, Reply, run_in_child
from support.disk_store import Faults, failing, open_with, store_of

FLAGS = ("--max-total-tokens", "640", "--dtype", "float32", "--hc-forms", "hidden:2,kv:2")
FAULTS = [
    "EIO on reads", "short reads", "EIO on writes", "no space", "read-only", "1 MB/s", "removed",
]  # fmt: skip

WHILE_SAVING = ["EIO on writes", "no space", "read-only"]


def prompts(name: str) -> tuple[list[int], list[int]]:
    rng = random.Random(name)
    return [rng.randrange(3, 900) for _ in range(200)], [rng.randrange(3, 900) for _ in range(20)]


def talk(core: Core, name: str, between: Callable[[], None]) -> tuple[list[int], Reply]:
    """Two turns with something in between."""
    first, follow = prompts(name)
    said = core.ask(first, 30).tokens
    core.settle()
    between()
    return said, core.ask([*first, *said, *follow], 16)


def undisturbed() -> dict[str, tuple[list[int], list[int]]]:
    core = Core("--max-total-tokens", "8000", "--dtype", "float32", "--hc-forms", "kv")
    replies = {name: talk(core, name, lambda: None) for name in FAULTS}
    return {name: (said, reply.tokens) for name, (said, reply) in replies.items()}


def meet_faults(folder: str) -> dict[str, tuple]:
    """Per fault: both replies, the reply afterwards, and what was counted."""
    from sglang_hc.queue import prefetch

    faults = Faults()
    open_with(faults)
    core = Core("--hc-disk", f"{folder}:1", "--hc-host-size-gb", "0.2", *FLAGS)
    well, patience = vars(Faults()).copy(), prefetch.PATIENCE

    def forget(then: Callable[[], None] = lambda: None) -> None:
        assert core.scheduler.flush_cache()
        then()

    def set_in(name: str) -> None:
        if name == "EIO on reads":
            faults.on_read = failing(errno.EIO)
        elif name == "short reads":
            faults.short = 512
        elif name == "EIO on writes":
            faults.on_write = failing(errno.EIO)
        elif name == "no space":
            faults.on_write = failing(errno.ENOSPC)
        elif name == "read-only":
            faults.on_write = failing(errno.EROFS)
        elif name == "1 MB/s":
            faults.bytes_per_second = 1e6
            prefetch.PATIENCE = 0.1
        else:
            shutil.rmtree(folder)

    results = {}
    for name in FAULTS:
        before = dict(core.tree.stats())
        if name in WHILE_SAVING:
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
