"""Two tensor-parallel ranks, two stages of a pipeline or two stages of two ranks each, and a remote
store: each rank keeps its part of a block there. Another server goes on where one stopped, as it
does from their disk, one with other ranks finds nothing, and what happens to one rank's part costs
cache on all, never a token.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.store import known_blocks as remote_blocks
from sglang_hc.store.disk.folders import model_folders, store_root
from sglang_hc.store.remote import RemoteStore
from sglang_hc.tools.disk.fsck import check
from support.core import Core, run_in_child
from support.prompts import in_store, on_disk
from support.ranked_core import CORES, run_ranks
from support.ranked_turns import (
    BLOCKS,
    FLAGS,
    Turns,
    check_tokens,
    engine,
    go_on,
    prompts,
    talk,
    talk_and_stop,
)
from support.waiting import HANGS_S, until

HIT_BY = 1
"""The rank that faults happen to."""


def files(shared: Path) -> list[Path]:
    return sorted(Path(shared).iterdir())


def check_alike(found: list[Turns]) -> None:
    """All ranks counted the same, except what only the first one does: it says whose part of a
    block failed, and of stages it alone recomputes layers."""
    check_tokens(found)
    first, *others = (
        {
            name: count
            for name, count in turns.counted.items()
            if count and not name.startswith(("rank", "recomputed"))
        }
        for turns in found
    )
    assert all(other == first for other in others)


def check_parts(folder: Path, tier: str, ranks: int) -> None:
    """Each rank has its own parts of all blocks."""
    if tier == "remote":
        keys = [file.name.split("-")[1] for file in files(folder)]
        assert len(set(keys)) == ranks and keys.count(keys[0]) * ranks == len(keys)
        return
    parts = [Path(part.path).name for part in model_folders(store_root(str(folder)))]
    assert len(parts) == ranks and len({part[:32] for part in parts}) == 1, "of one model"
    assert all(report.blocks and not report.findings for report in check([str(folder)], False))


BY_DAY = [("tp", "hidden:2,kv:2", "llama-gqa")]
BY_NIGHT = [
    ("tp", "hidden", "llama-mha"),
    ("tp", "kv", "llama-gqa"),
    ("tp", "recompute:1,hidden:2,kv:1", "qwen3"),
    ("tp", "kv", "deepseek-v2"),
    ("pp", "recompute:1,hidden:3", "llama-gqa"),
    ("pp", "hidden:2,kv:2", "llama-gqa"),
    ("pp", "hidden", "llama-mha"),
    ("pp", "kv", "llama-gqa"),
    ("grid", "hidden:2,kv:2", "llama-gqa"),
]


@pytest.mark.parametrize(
    ("below", "tier"),
    [(on_disk, "disk"), pytest.param(in_store, "remote", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    ("kind", "form", "model"),
    [*BY_DAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in BY_NIGHT)],
)
def test_another_server_goes_on_from_what_is_below(
    models: None,
    tmp_path: Path,
    kind: str,
    form: str,
    model: str,
    below: Callable[[object], tuple[str, ...]],
    tier: str,
) -> None:
    """Within one server only that is left between the turns, too."""
    what, ranks = (kind, form, model, *below(tmp_path)), 4 if kind == "grid" else 2
    found = run_ranks(talk_and_stop, *what, ranks=ranks)
    check_alike([turns for turns, _ in found])
    assert all(turns.stored == BLOCKS for turns, _ in found)
    assert found[0][0].counted[f"{tier}_loaded_blocks"] == BLOCKS // BLOCK_TOKENS
    check_parts(tmp_path, tier, ranks)
    later = run_ranks(go_on, *what, ranks=ranks)
    check_alike(later)
    assert later[0].said == found[0][1] and later[0].stored == BLOCKS


def alone(shared: str) -> tuple[int, dict[str, int]]:
    """A server of one rank goes on with the conversation."""
    core = Core("--hc-forms", "kv", *in_store(shared), *FLAGS, model="llama-gqa")
    prompt, follow = prompts("later")
    said = core.ask(prompt, 60, "kept").tokens
    wanted = core.ask([*prompt, *said, *follow], 24, "kept").tokens
    reply = core.ask([*prompt, *said, *follow], 24)
    core.settle()
    assert reply.tokens == wanted
    return reply.cached, core.tree.tiers.counts()


@pytest.mark.slow
def test_a_server_with_other_ranks_finds_nothing(models: None, tmp_path: Path) -> None:
    """Parts of a block are other bytes; so are the whole ones."""
    shared = str(tmp_path)
    what = "kv", "llama-gqa", *in_store(shared)
    run_ranks(talk_and_stop, "tp", *what)
    cached, counts = run_in_child(alone, shared)
    assert cached == 0 and "remote_loaded_blocks" not in counts
    assert counts["remote_saved_blocks"] > 0, "whole blocks are there beside the parts now"
    for turns in run_ranks(go_on, "pp", *what):
        assert turns.second == turns.wanted and turns.stored == 0
        assert "remote_loaded_blocks" not in turns.counted
    assert len({file.name.split("-")[1] for file in files(tmp_path)}) == 5
    assert run_ranks(go_on, "tp", *what)[0].stored == BLOCKS


# -- faults of one rank's part -------------------------------------------------------------------


def raising(*_: Any) -> Any:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def objects_of(store: RemoteStore, shared: str) -> list[Path]:
    """What this rank has in the store."""
    return list(Path(shared).glob(f"hc3-*{store._model.part.hex()}-*"))


def damage(store: RemoteStore, shared: str) -> None:
    """Every object that this rank has in the store loses a byte."""
    for file in objects_of(store, shared):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def lose(store: RemoteStore, shared: str) -> None:
    for file in objects_of(store, shared):
        file.unlink()


def swap(store: RemoteStore, other: bytes, shared: str) -> None:
    """Under each of this rank's keys lies the other rank's part."""
    for file in objects_of(store, shared):
        name = file.name.replace(store._model.part.hex(), other.hex())
        file.write_bytes(file.with_name(name).read_bytes())


def meet_faults(
    rank: int, port: int, kind: str, shared: str
) -> tuple[dict[str, Turns], dict[str, Any]]:
    """Turns by the fault that came between them, and what /server_info shows then."""
    from sglang_hc.store.disk.format import part_of

    core = engine(rank, port, kind, "hidden:2,kv:2", "llama-gqa", *in_store(shared))
    blocks = core.tree.tiers.disk._io
    store = blocks._store._inner
    backend = store._backend
    first = part_of(core.tree.tiers.host.tree.fingerprint, f"{kind}2-0")
    is_hit = rank == HIT_BY

    def on_it(call: Callable[..., None], *args: Any) -> Callable[[], None]:
        def between() -> None:
            blocks._presence.clear()  # it was long ago
            if is_hit:
                call(*args)

        return between

    def instead(**calls: Callable[..., Any]) -> None:
        """What the back end does instead of what it is asked for."""
        vars(backend).update(calls if is_hit else {})

    def well() -> None:
        """Pauses are over, and what was done instead."""
        for name in ("exists", "get", "put"):
            vars(backend).pop(name, None)
        blocks._reading.succeeded()
        blocks._saving.succeeded()

    found = {"well": talk(core, "well", on_it(lambda: None))}
    found["damaged"] = talk(core, "damaged", on_it(damage, store, shared))
    found["lost"] = talk(core, "lost", on_it(lose, store, shared))
    found["foreign"] = talk(core, "foreign", on_it(swap, store, first, shared))
    found["unreadable"] = talk(core, "unreadable", on_it(lambda: instead(get=raising)))
    well()
    found["away"] = talk(core, "away", on_it(lambda: instead(get=raising, exists=raising)))
    well()
    instead(put=raising)
    found["unwritable"] = talk(core, "unwritable", on_it(lambda: None))
    well()
    slow = backend.get
    late = on_it(lambda: instead(get=lambda *args: (time.sleep(0.5), slow(*args))[1]))
    found["slow"] = talk(core, "slow", late)
    well()
    goes_on = threading.Event()
    hanging = on_it(lambda: instead(exists=lambda _: goes_on.wait(HANGS_S) and 0))
    remote_blocks.LOOKUP_S, patience = 2.0, remote_blocks.LOOKUP_S
    found["hangs"] = talk(core, "hangs", hanging)
    remote_blocks.LOOKUP_S = patience
    goes_on.set()
    well()
    until(lambda: not store.hangs)
    found["after"] = talk(core, "after", on_it(lambda: None))
    return found, core.shown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", CORES)
def test_what_one_rank_cannot_read_or_write_both_recompute(
    models: None, tmp_path: Path, kind: str
) -> None:
    both = run_ranks(meet_faults, kind, str(tmp_path))
    found, shown = [turns for turns, _ in both], both[0][1]
    for name in found[0]:
        turns = [of_rank[name] for of_rank in found]
        check_tokens(turns)
        served = name in ("well", "slow", "after")
        assert turns[0].stored == (BLOCKS if served else 0), name
    for name, counter, of_rank in (
        ("damaged", "remote_read_damaged", "remote_damaged"),
        ("foreign", "remote_read_damaged", "remote_damaged"),
        ("unreadable", "remote_read_io_error", "remote_io_error"),
        ("away", "remote_lookup_io_error", "lookup_io_error"),
        ("unwritable", "remote_write_io_error", "remote_io_error"),
        ("hangs", "remote_lookup_timed_out", "lookup_timed_out"),
    ):
        first, second = (turns[name].counted for turns in found)
        assert first[counter] == second[counter] > 0, "it counts for all"
        assert first[f"rank{HIT_BY}_{of_rank}"] > 0
        assert not first.get(f"rank{1 - HIT_BY}_{of_rank}"), "the other rank's part is well"
        assert shown[f"rank{HIT_BY}_{of_rank}"] > 0
    for counted, is_hit in zip(shown["ranks"], (False, True), strict=True):
        for name in ("remote_foreign", "remote_hangs"):
            assert (counted.get(name, 0) > 0) == is_hit, "each rank shows its own"
