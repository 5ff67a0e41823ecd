"""The test of a start, over SGLang's real scheduler: it passes, and it fails with a sentence that
names the seam where SGLang does not run one hook, which is in place all the same."""

from __future__ import annotations

import asyncio
import os
import pkgutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from benchmark import ROOT
from benchmark.harness.server import free_port
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt import plugin
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.engine import in_place
from sglang_hc.srt.requests import self_test
from support.core import MODELS, Core, run_in_child
from support.prompts import SMALL, on_disk, prompt
from support.waiting import HANGS_S

SERVED = sorted(
    {hook.target for hook in plugin.all_hooks() if hook.proof is in_place.Proof.SCHEDULER}
)


class Manager:
    """What the test of a start asks of SGLang's tokenizer manager, of an engine without one."""

    is_generation = True

    def __init__(self, core: Core) -> None:
        self._core = core
        self.server_args = core.args
        self.model_config = core.scheduler.model_config
        self.context_len = core.scheduler.max_req_input_len

    async def get_internal_state(self) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import GetInternalStateReq

        return [self._core.scheduler.get_internal_state(GetInternalStateReq()).internal_state]

    async def dumper_control(self, asked: Any) -> list[Any]:
        answers: list[Any] = []
        channel = self._core.scheduler.ipc_channels.send_to_tokenizer
        channel.send_output = lambda output, _: answers.append(output)
        self._core.tree.tiers.drain()
        self._core.scheduler.handle_dumper_control(asked)
        return answers

    async def generate_request(self, asked: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        core = self._core
        rid = core.submit(asked.input_ids, 1, asked.extra_key, top=1)
        while rid not in core.requests or not core.requests[rid].finished():
            core.run(steps=1)  # others go on for so long
        reply = core.reply(rid)
        value = core.requests[rid].logprob.output_token_logprobs_val[0]
        yield {
            "meta_info": {
                "cached_tokens_details": {"device": reply.device, "host": reply.host},
                "output_token_logprobs": [(float(value), reply.tokens[0], None)],
            }
        }


def start(undo: str, *flags: str) -> str:
    """What a start shows where SGLang does not run the hooks of a function; empty: all is well."""
    owner, _, name = undo.rpartition(".")
    for _ in HookRegistry._hooks.get(undo, ()):
        found = pkgutil.resolve_name(owner)
        setattr(found, name, vars(found)[name].__wrapped__)
    self_test.STORED_S = 3.0
    core = Core(*SMALL, *flags)
    in_place._proven = True  # else the scheduler would end itself, as it does without the test
    if owner == "HcRadixCache":
        setattr(core.tree, name, lambda: -1)
    try:
        asyncio.run(self_test.prove(Manager(core)))
    except self_test.NotProven as error:
        tree = core.tree
        left = tree.restorer.planner.always or list(tree.tiers.host.tree.nodes())
        assert not left or undo, "nothing is left of a test that came to its end"
        return str(error)
    return ""


@pytest.mark.parametrize(
    "flags",
    [
        ("--hc-forms", "kv"),
        ("--hc-forms", "hidden:2,kv:2", "--page-size", "16"),
        ("--hc-forms", "recompute:1,kv:3", "--page-size", "128"),
    ],
)
def test_a_sound_start_passes(models: None, flags: tuple[str, ...]) -> None:
    """But for the tokenizer's hooks: there is no tokenizer here."""
    assert run_in_child(start, "", *flags).startswith("never called in the tokenizer")


@pytest.mark.parametrize("undo", SERVED)
def test_a_hook_that_sglang_does_not_call_is_named(models: None, undo: str) -> None:
    said = run_in_child(start, undo, "--hc-forms", "kv")
    assert said.startswith("never called in the scheduler") and undo in said


def test_what_is_not_restored_in_time_is_noticed(models: None) -> None:
    """SGLang does not ask for the restorations of a pass: attention reads what is in the slots."""
    said = run_in_child(start, "HcRadixCache.ready_to_load_host_cache", "--hc-forms", "kv")
    assert said.startswith("attention read something else")


@pytest.mark.parametrize("failures", [self_test.TRIES - 1, self_test.TRIES])
def test_it_is_tried_so_often(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    tried: list[int] = []

    async def fails(*_: Any) -> None:
        tried.append(1)
        if len(tried) <= failures:
            raise self_test.NotProven("somebody cleared the cache")

    sizes = {"page_size": 1, "stages": 1, "replicas": 1, "draft_algorithm": None}
    for name, value in sizes.items():
        monkeypatch.setattr(arguments, name, lambda args, value=value: value)
    monkeypatch.setattr(self_test, "_prove_replica", fails)
    core: Any = SimpleNamespace(
        args=None,
        scheduler=SimpleNamespace(
            model_config=None,
            max_req_input_len=2 * BLOCK_TOKENS + 4,
            get_internal_state=lambda _: SimpleNamespace(internal_state={"hc": {}}),
        ),
    )
    last = "cleared" if failures == self_test.TRIES else "never called in the tokenizer"
    with pytest.raises(self_test.NotProven, match=last):
        asyncio.run(self_test.prove(Manager(core)))
    assert len(tried) == self_test.TRIES
    core.scheduler.max_req_input_len -= 1
    asyncio.run(self_test.prove(Manager(core)))
    assert len(tried) == self_test.TRIES, "a prompt that has no room is not asked for"


CLIENT = prompt("client", 100)


def beside_a_client(folder: str) -> tuple[list[int], list[int], int]:
    """The reply to a client without a namespace who is served meanwhile, the same again, and the
    blocks on disk."""
    core = Core(*SMALL, "--hc-forms", "kv", "--disable-overlap-schedule", *on_disk(folder))
    rid = core.submit(CLIENT, 200)
    core.run(steps=5)
    with pytest.raises(self_test.NotProven, match="in the tokenizer"):
        asyncio.run(self_test.prove(Manager(core)))
    assert not core.requests[rid].finished(), "nobody was served beside the test"
    core.run()
    core.settle()
    blocks = core.tree.stats()["disk_blocks"]
    return core.reply(rid).tokens, core.ask(CLIENT, 200).tokens, blocks


def test_a_client_who_is_served_meanwhile_loses_nothing(models: None, tmp_path: Path) -> None:
    """Nothing of the test goes to disk."""
    meanwhile, again, blocks = run_in_child(beside_a_client, str(tmp_path))
    assert meanwhile == again and blocks == (len(CLIENT) + 200) // BLOCK_TOKENS


@pytest.mark.server
@pytest.mark.slow
def test_such_a_server_ends_with_one_sentence(models: None, tmp_path: Path) -> None:
    """Another plugin has SGLang's function run without our hook, in every process."""
    (tmp_path / "undo.py").write_text(UNDO)
    about = tmp_path / "undo-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: undo\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nundo = undo:activate\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_hc.launch_server", "--hc-forms", "kv", *SMALL),
            *("--model-path", str(MODELS / "llama-mha"), "--port", str(free_port())),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    said = [line for line in lines if "sglang-hc:" in line and "the tiers do not serve" in line]
    assert len(said) == 1 and "Scheduler._add_request_to_queue" in said[0]


UNDO = """
from sglang.srt.plugins.hook_registry import HookRegistry

def activate():
    apply = HookRegistry._apply_target
    def all_but_one(target, hooks):
        if not target.endswith("_add_request_to_queue"):
            apply(target, hooks)
    HookRegistry._apply_target = all_but_one
"""
