"""Priorities, aborts and adapters beside sliding windows and a sparse-attention index, under
SGLang's real scheduler: what was taken out or left comes back with its end or its index, and goes
on word for word, and nobody gets those of another adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import aborts, sparse_core, sparse_model, window_core, window_model
from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, Reply, run_in_child
from support.during import When
from support.prompts import prompt

ENGINES: dict[str, Callable[..., Core]] = {
    "gpt-oss-96": window_core.engine,
    "deepseek-v3.2": sparse_core.engine,
}

LOW, HIGH, MORE = prompt("low", 150), prompt("high", 200), prompt("more", 70)
NEW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kinds")
    window_model.make(made, "gpt-oss-96")
    sparse_model.make(made)
    return made


# -- priorities -----------------------------------------------------------------------------------


def alone(model: Path) -> list[list[int]]:
    core = ENGINES[model.name](str(model), "--hc-disable")
    return [core.ask(tokens, NEW).tokens for tokens in (LOW, HIGH)]


def preempted(model: Path, *flags: str) -> tuple[list[list[int]], int, dict[str, Any]]:
    """Replies to a request and to one of a higher priority that takes its place while it decodes;
    all of the first one leaves the device then. How often that was, and what was counted."""
    places = "--max-running-requests", "1", "--enable-priority-scheduling"
    core = ENGINES[model.name](str(model), *places, *flags)
    rids = [core.submit(LOW, NEW)]
    core.inbox[-1].priority = 0

    def leave() -> None:
        core.tree.tiers.drain()
        core.evict()

    def is_out() -> bool:
        waiting = core.scheduler.waiting_queue
        return any(req.retraction_count for req in waiting)

    left = When(is_out, leave)

    def each_pass(number: int) -> None:
        left(number)
        if number == 20:
            rids.append(core.submit(HIGH, NEW))
            core.inbox[-1].priority = 100

    core.run(each_pass=each_pass)
    core.settle()
    core.check_device()
    replies = [core.reply(rid).tokens for rid in rids]
    return replies, core.requests[rids[0]].retraction_count, core.tree.stats()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_what_a_priority_took_out_comes_back(folder: Path, name: str) -> None:
    wanted = run_in_child(alone, folder / name)
    found, times, stats = run_in_child(preempted, folder / name)
    assert found == wanted and times == 1
    assert stats["retracted_restored_tokens"] >= 128 and "guarded_errors" not in stats


# -- aborts ---------------------------------------------------------------------------------------


def aborted(
    model: Path, passes: Sequence[int], *flags: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """passes: as for `aborts.talk`."""
    core = ENGINES[model.name](str(model), "--chunked-prefill-size", "64", *flags)
    more = [prompt(number, 150) for number in range(3)]
    replies = aborts.talk(core, prompt("first", 300), more, passes)
    return replies, core.tree.stats() if passes else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_aborts_leave_what_can_be_continued(folder: Path, name: str) -> None:
    wanted, _ = run_in_child(aborted, folder / name, (), "--hc-disable")
    found, stats = run_in_child(aborted, folder / name, range(1, 14))
    assert found == wanted
    assert stats["restored_tokens"] > 5 * 320 and "guarded_errors" not in stats


# -- adapters -------------------------------------------------------------------------------------


class Talk(NamedTuple):
    """Two replies, the second one behind what was said first."""

    first: Reply
    second: Reply


def adapter(folder: Path, seed: int, model: Path) -> str:
    """As `write_adapter`; behind latent attention, whose projections are others."""
    if "deepseek" not in model.name:
        return write_adapter(folder, seed, str(model))
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank = config["hidden_size"], 4
    heads = config["num_attention_heads"] * config["v_head_dim"]
    random = torch.Generator().manual_seed(seed)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_{part}.weight": torch.randn(
            shape, generator=random
        )
        for layer in range(config["num_hidden_layers"])
        for part, shape in (("A", (rank, heads)), ("B", (hidden, rank)))
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return str(folder)


def talks(model: Path, adapters: dict[str, str], *flags: str) -> dict[str, Talk]:
    """The same prompts to the model alone and with each adapter. With the tiers all leaves the
    device behind the first ones."""
    core = ENGINES[model.name](str(model), *adapter_flags(adapters, 2), *flags)
    ids = adapter_ids(core)

    def ask(tokens: list[int]) -> dict[str, Reply]:
        found = {}
        for name in ("none", *ids):
            rid = core.submit(tokens, 12, lora=ids.get(name))
            core.run()
            found[name] = core.reply(rid)
        return found

    first = ask(LOW)
    if "--hc-disable" not in flags:
        core.settle()
        core.evict()
    second = ask(LOW + MORE)
    core.settle()
    return {name: Talk(first[name], second[name]) for name in first}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_end_and_an_index_belong_to_their_adapter(
    folder: Path, tmp_path: Path, name: str
) -> None:
    model = folder / name
    adapters = {own: adapter(tmp_path / own, seed, model) for seed, own in enumerate("ab")}
    wanted = run_in_child(talks, model, adapters, "--hc-disable")
    found = run_in_child(talks, model, adapters)
    for who, talk in found.items():
        assert [one.tokens for one in talk] == [one.tokens for one in wanted[who]], who
        assert (talk.first.cached, talk.second.host) == (0, 128), who
    replies = [talk.second.tokens for talk in found.values()]
    assert len({tuple(reply) for reply in replies}) == len(replies), "adapters change nothing"
