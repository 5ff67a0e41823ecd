"""State is served to those whose it is: through SGLang's scheduler, with a disk that is kept."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.adapters import pin_nothing, write_adapter
from support.core import Core, run_in_child

MODEL = "llama-gqa"
FLAGS = (
    *("--max-total-tokens", "2048", "--hc-host-size-gb", "0.2", "--dtype", "float32"),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "2"),
)
PROMPT = [random.Random(5).randrange(3, 900) for _ in range(300)]


def ask(flags: list[str], named: str | None, keys: list[str | None]) -> list[tuple[Any, int]]:
    """Replies to PROMPT, and what was found for each, of a fresh server with the adapter `named`,
    or with none of it. keys: the client's, one for each request; LORA stands for the adapter's id.
    """
    pin_nothing()
    core = Core(*flags, *FLAGS, model=MODEL)
    refs = core.scheduler.tp_worker.model_runner.lora_manager.lora_refs
    lora = next(iter(refs))
    replies = []
    for key in keys:
        adapter = lora if key != "LORA" and named is not None else None
        rid = core.submit(PROMPT, 12, lora if key == "LORA" else key, lora=adapter)
        core.run()
        reply = core.reply(rid)
        replies.append((reply.tokens, reply.cached))
        core.settle()
    return replies


@pytest.mark.parametrize("forms", ["kv", "hidden"])
def test_an_adapter_retrained_at_the_same_path_gets_no_state_of_the_old_one(
    models: None, tmp_path: Path, forms: str
) -> None:
    folder = tmp_path / "adapter"
    write_adapter(folder, 1, MODEL)
    disk = ["--hc-disk", f"{tmp_path / 'disk'}:1", "--hc-forms", forms]
    paths = ["--lora-paths", f"a={folder}"]
    (old, found), (again, warm) = run_in_child(ask, disk + paths, "a", [None, None])
    assert found == 0 and warm > 0 and again == old
    ((kept, restored),) = run_in_child(ask, disk + paths, "a", [None])
    assert kept == old and restored >= 256, "the same adapter finds its state after a restart"
    shutil.rmtree(folder)
    write_adapter(folder, 2, MODEL)
    ((new, stale),) = run_in_child(ask, disk + paths, "a", [None])
    ((truth, _),) = run_in_child(ask, paths, "a", [None])
    assert stale == 0 and new == truth != old
    elsewhere = tmp_path / "elsewhere"
    write_adapter(elsewhere, 1, MODEL)
    ((moved, found),) = run_in_child(ask, [*disk, "--lora-paths", f"b={elsewhere}"], "b", [None])
    assert moved == old and found >= 256, "an adapter is its content, not its name or place"


def test_a_key_that_is_an_adapters_id_is_a_key(models: None, tmp_path: Path) -> None:
    """SGLang appends the adapter's id, which anybody can compute, to the client's key."""
    folder = tmp_path / "adapter"
    write_adapter(folder, 1, MODEL)
    flags = ["--lora-paths", f"a={folder}"]
    (own, first), (_, found) = run_in_child(ask, flags, "a", ["LORA", None])
    assert first == found == 0, "state of the base model under the name of an adapter"
    ((base, _),) = run_in_child(ask, flags, None, [None])
    assert own == base


def with_embedding(forms: str) -> list[int]:
    """What was found of a prompt whose first request had an input beside its tokens, then of its
    copy without one."""
    core = Core("--hc-forms", forms, *FLAGS[:6])
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
