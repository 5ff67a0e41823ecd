"""State is served to those whose it is: through SGLang's scheduler, with a disk that is kept."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, run_in_child
from support.prompts import on_disk

MODEL = "llama-gqa"
FLAGS = ("--max-total-tokens", "2048", "--hc-host-size-gb", "0.2", "--dtype", "float32")
PROMPT = [random.Random(5).randrange(3, 900) for _ in range(300)]


def ask(
    adapter: Path, *flags: str, keys: Sequence[str | None] = (None,), used: bool = True
) -> list[tuple[Any, int]]:
    """Replies to PROMPT, and what was found for each, of a fresh server with an adapter. keys: the
    client's, one for each request; LORA stands for the adapter's id. used: requests name it."""
    core = Core(*adapter_flags({adapter.name: str(adapter)}, 2), *flags, *FLAGS, model=MODEL)
    (lora,) = adapter_ids(core).values()
    replies = []
    for key in keys:
        adapter_id = lora if key != "LORA" and used else None
        rid = core.submit(PROMPT, 12, lora if key == "LORA" else key, lora=adapter_id)
        core.run()
        reply = core.reply(rid)
        replies.append((reply.tokens, reply.cached))
        core.settle()
    return replies


@pytest.mark.parametrize("forms", [pytest.param("kv", marks=pytest.mark.slow), "hidden"])
def test_an_adapter_retrained_at_the_same_path_gets_no_state_of_the_old_one(
    models: None, tmp_path: Path, forms: str
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, 1, MODEL)
    disk = (*on_disk(tmp_path / "disk"), "--hc-forms", forms)
    (old, found), (again, warm) = run_in_child(partial(ask, keys=(None, None)), folder, *disk)
    assert found == 0 and warm > 0 and again == old
    ((kept, restored),) = run_in_child(ask, folder, *disk)
    assert kept == old and restored >= 256, "the same adapter finds its state after a restart"
    shutil.rmtree(folder)
    write_adapter(folder, 2, MODEL)
    ((new, stale),) = run_in_child(ask, folder, *disk)
    ((truth, _),) = run_in_child(ask, folder)
    assert stale == 0 and new == truth != old
    elsewhere = tmp_path / "elsewhere"
    write_adapter(elsewhere, 1, MODEL)
    ((moved, found),) = run_in_child(ask, elsewhere, *disk)
    assert moved == old and found >= 256, "an adapter is its content, not its name or place"


def test_a_key_that_is_an_adapters_id_is_a_key(models: None, tmp_path: Path) -> None:
    """SGLang appends the adapter's id, which anybody can compute, to the client's key."""
    folder = tmp_path / "adapter"
    write_adapter(folder, 1, MODEL)
    (own, first), (_, found) = run_in_child(partial(ask, keys=("LORA", None)), folder)
    assert first == found == 0, "state of the base model under the name of an adapter"
    ((base, _),) = run_in_child(partial(ask, used=False), folder)
    assert own == base


def with_embedding(forms: str) -> list[int]:
    """What was found of a prompt whose first request had an input beside its tokens, then of its
    copy without one."""
    core = Core("--hc-forms", forms, *FLAGS)
    rng = random.Random(1)
    found = []
    for kind in ("multimodal_inputs", "token_type_ids", None):
        prompt = [rng.randrange(3, 900) for _ in range(200)]
        add = core.scheduler._add_request_to_queue
        if kind is not None:

            def marked(req: Any, *args: Any, add: Any = add, kind: str = kind, **kw: Any) -> None:
                from types import SimpleNamespace

                setattr(req, kind, SimpleNamespace(mm_items=[], mrope_positions=None))
                add(req, *args, **kw)
                setattr(req, kind, None)  # as SGLang does when it is over

            core.scheduler._add_request_to_queue = marked
        core.ask(prompt, 4)
        core.scheduler._add_request_to_queue = add
        core.settle()
        core.evict()
        found.append(core.ask(prompt, 4).cached)
        core.settle()
    return found


@pytest.mark.parametrize("forms", ["kv", "hidden"])
def test_state_of_other_inputs_stays_on_the_device(models: None, forms: str) -> None:
    image, types, text = run_in_child(with_embedding, forms)
    assert image == types == 0 and text >= 128


# -- behind a cut ----------------------------------------------------------------------------------

TURNS = 6
CUT = (
    "--context-length", "512", "--hc-overflow-drop", "0.34", "--hc-overflow-reserve", "64",
)  # fmt: skip


class Talk(NamedTuple):
    """Replies, and per turn the tokens that were found."""

    replies: list[list[int]]
    found: list[int]


def talk(core: Core, lora: str | None, salt: str | None, evict: bool) -> Talk:
    """Turns of a conversation whose prompts are the same whatever is replied; most are cut."""
    rng = random.Random(1)
    history, found = [rng.randrange(3, 900) for _ in range(380)], Talk([], [])
    for _ in range(TURNS):
        history += [rng.randrange(3, 900) for _ in range(70)]
        core.settle()
        if evict:
            core.evict()
        rid = core.submit(history, 12, salt, lora=lora)
        core.run()
        reply = core.reply(rid)
        found.replies.append(reply.tokens)
        found.found.append(reply.cached)
    core.settle()
    return found


def talks(mode: str, adapters: dict[str, str]) -> tuple[dict[str, list[Talk]], dict[str, int]]:
    """By adapter, and "none": kept on the device, evicted between turns."""
    core = Core("--hc-overflow", mode, *adapter_flags(adapters, 2), *FLAGS, *CUT, model=MODEL)
    ids = adapter_ids(core)
    found: dict[str, list[Talk]] = {name: [] for name in (*ids, "none")}
    for salt, evict in ((None, False), ("evicted", True)):
        for name, talked in found.items():  # in turns, with the same prompts and key
            talked.append(talk(core, ids.get(name), salt, evict))
    return found, core.tree.tiers.counts()


@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "reembed"])
def test_state_behind_a_cut_belongs_to_its_adapter(models: None, tmp_path: Path, mode: str) -> None:
    adapters = {name: write_adapter(tmp_path / name, i, MODEL) for i, name in enumerate("ab")}
    found, counts = run_in_child(talks, mode, adapters)
    for name, (kept, evicted) in found.items():
        assert evicted.replies == kept.replies, name
        assert kept.found[0] == evicted.found[0] == 0, "state of another adapter was found"
        assert min(evicted.found[2:]) >= 64
        if mode == "reembed":
            assert min(evicted.found[2:]) >= 256
    replies = [kept.replies for kept, _ in found.values()]
    assert all(a != b for a, b in zip(replies, replies[1:] + replies[:1], strict=True))
    assert (counts.get("overflow_moved_tokens", 0) > 0) == (mode == "reembed")
