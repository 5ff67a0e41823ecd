"""What SGLang's KV events say of a server with the tiers, beside what they say of plain SGLang."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, run_in_child
from support.prompts import SMALL, prompt

MODEL = "llama-gqa"
PROMPT = prompt(7, 70)
EVENTS = ("--kv-events-config", json.dumps({"publisher": "zmq"}))
ASKED = ({}, {"salt": "a"}, {"key": "k"}, {"lora": "adapter"})
"""The same tokens in four namespaces."""


def told(adapter: str, *flags: str) -> list[list[dict[str, Any]]]:
    """The events of each of these requests, one behind the other."""
    from sglang.srt.disaggregation.kv_events import BlockStored, EventPublisherFactory

    seen: list[Any] = []
    publisher = SimpleNamespace(publish=lambda batch: seen.extend(batch.events))
    EventPublisherFactory.create = lambda *_: publisher  # type: ignore[method-assign]
    loras = adapter_flags({"adapter": adapter}, 2)
    core = Core(*loras, "--page-size", "16", *EVENTS, *flags, *SMALL, model=MODEL)
    found = []
    for one in ASKED:
        rid = core.submit(PROMPT, 4, lora=adapter_ids(core)["adapter"] if "lora" in one else None)
        core.inbox[-1].cache_salt, core.inbox[-1].extra_key = one.get("salt"), one.get("key")
        core.run()
        assert core.reply(rid).cached == 0
        found.append([structs.asdict(event) for event in seen if isinstance(event, BlockStored)])
        seen.clear()
    return found


@pytest.fixture(scope="module")
def events(models: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(of a server with the tiers, of one without)."""
    adapter = write_adapter(tmp_path_factory.mktemp("events") / "adapter", 1, MODEL)
    ours = run_in_child(told, adapter, "--hc-forms", "kv")
    return ours, run_in_child(told, adapter, "--hc-disable")


def test_without_salts_and_adapters_they_are_the_same(events: tuple[Any, Any]) -> None:
    ours, plain = events
    assert ours[0] == plain[0] != [] and ours[2] == plain[2] != []


def test_what_they_leave_out(events: tuple[Any, Any]) -> None:
    """The documented difference: the namespace takes the place of salt and adapter, so blocks of
    the same tokens have the same hashes whosever they are."""
    ours, plain = events
    for number, name, value in ((1, "cache_salt", "a"), (3, "lora_name", "adapter")):
        (mine,), (theirs,) = ours[number], plain[number]
        assert theirs[name] == value and mine[name] is None
        assert theirs["block_hashes"] != plain[0][0]["block_hashes"]
        assert mine == ours[0][0]
