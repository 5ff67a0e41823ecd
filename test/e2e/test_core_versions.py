"""New weights under SGLang's real scheduler: state of each version is found under it alone, and
again when it comes back, in host memory, on disk, in remote stores and behind a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.srt.model.weight_versions import digest_of
from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import MODELS, Core, Reply, run_in_child
from support.prompts import SMALL, in_directory, in_store, on_disk, prompt
from support.ranked_core import CORES, run_ranks
from support.storm_actions import ADAPTED_MODEL
from support.storm_oracle import change_weights, load_weights

OLD, ASKED, LATE = str(MODELS / "llama-mha"), prompt(2, 200), prompt(3, 200)
WHERE = [
    (on_disk, "hidden:2,kv:2"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in ((on_disk, "hidden"), (on_disk, "kv"), (in_store, "kv"), (in_directory, "kv"))
    ),
]
Below = Callable[[object], tuple[str, ...]]


@pytest.fixture
def new(models: None, tmp_path: Path) -> str:
    change_weights(Path(OLD), tmp_path / "new", 1)
    return str(tmp_path / "new")


def ask(core: Core) -> Reply:
    reply = core.ask(ASKED, 8)
    core.push_out()
    core.settle()
    return reply


def back_and_forth(form: str, new: str, *below: str) -> dict[str, Any]:
    core = Core("--hc-forms", form, *SMALL, *below)
    found: dict[str, Any] = {"old": [ask(core)], "new": []}
    for name, path in (("new", new), ("old", OLD), ("new", new)):
        load_weights(core, path)
        found[name].append(ask(core))
    core.forget()
    found["new"].append(ask(core))
    load_weights(core, OLD)
    found["old"].append(ask(core))
    found["stats"] = core.tree.stats()
    core.tree.weights._digest = lambda: "one for all"
    load_weights(core, OLD)
    ask(core)
    load_weights(core, new)
    found["planted"] = ask(core)
    core.tree.release_host_resources()
    return found


def restarted(form: str, new: str, *below: str) -> dict[str, Any]:
    core = Core("--hc-forms", form, *SMALL, *below)
    found = {"old": [ask(core)]}
    load_weights(core, new)
    found["new"] = [ask(core)]
    return found


def computed(form: str, model: str) -> Reply:
    return Core("--hc-forms", form, *SMALL, model=model).ask(ASKED, 8)


@pytest.mark.parametrize(("below", "form"), WHERE)
def test_a_version_that_comes_back_finds_what_it_left(
    below: Below, form: str, new: str, tmp_path: Path
) -> None:
    found = run_in_child(back_and_forth, form, new, *below(tmp_path / "below"))
    for name in ("old", "new"):
        computed_here, from_host, from_below = found[name]
        assert computed_here.cached == 0
        assert from_host.host == 199 and from_below.storage >= 192
        assert computed_here.tokens == from_host.tokens == from_below.tokens
    old, new_reply = found["old"][0].tokens, found["new"][0].tokens
    assert old != new_reply
    assert found["stats"]["weight_changes"] == 4 and found["stats"]["weights"] == "started"
    planted = found["planted"]
    assert planted.cached and planted.tokens != new_reply, "the test would not see a wrong block"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("below", "form"), [(on_disk, "hidden"), (on_disk, "kv"), (in_store, "kv")]
)
def test_replies_are_those_of_an_engine_that_began_with_the_weights(
    below: Below, form: str, new: str, tmp_path: Path
) -> None:
    """And a restart finds both versions where they were left."""
    flags = below(tmp_path / "below")
    first = run_in_child(back_and_forth, form, new, *flags)
    again = run_in_child(restarted, form, new, *flags)
    for name, model in (("old", OLD), ("new", new)):
        right = run_in_child(computed, form, model).tokens
        assert all(reply.tokens == right for reply in (*first[name], *again[name]))
        assert again[name][0].storage >= 192


def in_parts(form: str, new: str) -> dict[str, Any]:
    """Sessions that bring the new weights in two calls and take them back in one, the first while
    a request runs and another one waits."""
    from safetensors.torch import load_file
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )

    core = Core("--hc-forms", form, *SMALL, "--max-running-requests", "1")
    updater = core.scheduler.weight_updater
    updater.tp_worker.deserialize_own_rank = list  # SGLang's own way there needs a GPU

    def bring(weights: Any) -> None:
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=weights, flush_cache=False
        )
        assert updater.update_weights_from_tensor(request).success

    def update(path: str, calls: int) -> None:
        weights = sorted(load_file(Path(path) / "model.safetensors").items())
        assert updater.begin_weight_update(BeginWeightUpdateReqInput()).success
        for first in range(calls):
            bring(weights[first::calls])
        assert updater.end_weight_update(EndWeightUpdateReqInput()).success

    found: dict[str, Any] = {"old": [ask(core)], "new": []}
    running, waiting = core.submit(LATE, 40), core.submit(ASKED, 8)

    def change(number: int) -> None:
        if number == 12:
            assert core.tree.scheduler.decoding == 1 and len(core.scheduler.waiting_queue) == 1
            update(new, 2)

    core.run(each_pass=change)
    found["mixed"], found["waited"] = core.reply(running), core.reply(waiting)
    found["stats"] = core.tree.stats()
    found["on the device"] = core.ask([*LATE, *found["mixed"].tokens], 8)
    core.evict()
    core.settle()
    found["new"].append(ask(core))
    update(OLD, 1)
    found["old"].append(ask(core))
    found["late"] = core.ask([*LATE, *found["mixed"].tokens], 8)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hidden", "kv"])
def test_what_ran_while_the_weights_changed_is_of_no_version(form: str, new: str) -> None:
    found = run_in_child(in_parts, form, new)
    right = {name: run_in_child(computed, form, model).tokens
             for name, model in (("old", OLD), ("new", new))}  # fmt: skip
    assert found["stats"]["mixed_requests"] == 1
    assert found["waited"].cached == 0 and found["waited"].tokens == right["new"]
    assert found["on the device"].cached == 0
    assert found["new"][0].host == 199 and found["new"][0].tokens == right["new"]
    assert found["old"][1].host == 199
    assert [reply.tokens for reply in found["old"]] == [right["old"]] * 2
    assert found["late"].cached <= len(LATE), "its reply is of no version"


def read_twice(model: str) -> tuple[str, str]:
    """The digest before and behind what runs."""
    core = Core("--hc-forms", "kv", *SMALL, model=model)
    served = [core.scheduler.tp_worker.model_runner.model]
    before = digest_of(served)
    ask(core)
    return before, digest_of(served)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-v2", "qwen3-moe", "gpt2", "gemma"])
def test_what_runs_leaves_no_mark_in_the_digest(models: None, model: str) -> None:
    before, behind = run_in_child(read_twice, model)
    assert before == behind


# -- adapters ------------------------------------------------------------------------------------


def swapped(folders: list[str]) -> list[Reply]:
    """An adapter is retrained, and taken back, under one name; and what is asked of each."""
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

    flags = adapter_flags({"a": folders[0]}, 1)
    core, replies = Core("--hc-forms", "kv", *SMALL, *flags, model=ADAPTED_MODEL), []
    (lora,) = adapter_ids(core).values()
    for number in (0, 1, 0):
        if replies:
            unload = UnloadLoRAAdapterReqInput(lora_name="a", lora_id=lora)
            assert core.scheduler.unload_lora_adapter(unload).success
            lora = f"{len(replies):032x}"
            load = LoadLoRAAdapterReqInput(lora_name="a", lora_path=folders[number], lora_id=lora)
            assert core.scheduler.load_lora_adapter(load).success
        rid = core.submit(ASKED, 8, lora=lora)
        core.run()
        replies.append(core.reply(rid))
        core.push_out()
        core.settle()
    return replies


@pytest.mark.slow
def test_an_adapter_that_comes_back_under_its_name_finds_what_it_left(
    models: None, tmp_path: Path
) -> None:
    folders = [write_adapter(tmp_path / str(seed), seed, ADAPTED_MODEL) for seed in range(2)]
    one, other, again = run_in_child(swapped, folders)
    assert one.cached == other.cached == 0 and one.tokens != other.tokens
    assert again.host == 199 and again.tokens == one.tokens


# -- two ranks -----------------------------------------------------------------------------------


def on_a_rank(
    rank: int, port: int, kind: str, new: str, *below: str
) -> list[tuple[str, str | None, Reply]]:
    """Updates to the new weights and back; then one that brings the second rank nothing. The name
    of each, its digits, and what is asked behind it, at last of what is below host memory."""
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    core = CORES[kind](rank, port, "--hc-forms", "kv", *SMALL, *below)
    found = []
    for name, path in (("old", OLD), ("new", new), ("old", OLD), ("torn", new)):
        if name == "torn" and rank:
            fails: Any = lambda *_, **__: (False, "planted")  # noqa: E731
            WeightUpdater.update_weights_from_disk = fails  # type: ignore[method-assign]
        request = UpdateWeightFromDiskReqInput(
            model_path=path, load_format="auto", flush_cache=False
        )
        core.inbox.append(request)
        core.run()
        found.append((name, core.tree.version, core.ask(ASKED, 8)))
        core.push_out()
        core.settle()
        if len(found) == 3:
            core.forget()
            found.append((name, core.tree.version, core.ask(ASKED, 8)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "below"), [("tp", on_disk), ("pp", on_disk), ("pp", in_store)])
def test_ranks_agree_on_the_version(kind: str, below: Below, new: str, tmp_path: Path) -> None:
    """One whose update failed makes it another for both."""
    first, second = run_ranks(on_a_rank, kind, new, *below(tmp_path / "below"))
    assert [one[1] for one in first] == [one[1] for one in second]
    assert [one[2] for one in first] == [one[2] for one in second]
    versions = {name: version for name, version, _ in first}
    assert versions["old"] is None and len(set(versions.values())) == 3
    one, other, from_host, from_below, torn = (reply for _, _, reply in first)
    assert one.cached == other.cached == torn.cached == 0
    assert from_host.host == 199 and from_below.storage >= 192
    assert one.tokens == from_host.tokens == from_below.tokens != other.tokens
