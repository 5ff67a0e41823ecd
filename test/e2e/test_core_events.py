"""KV events of a server with the tiers: as SGLang's for the device, and of each tier below."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from support.adapters import adapter_flags, adapter_ids, write_adapter
from support.core import Core, run_in_child
from support.kv_events import TIERS, Ports, Subscriber, publish, settled, truth
from support.prompts import SMALL, on_disk, prompt
from support.waiting import until

MODEL = "llama-gqa"
PROMPT = prompt(7, 70)
ASKED = ({}, {"salt": "a"}, {"key": "k"}, {"lora": "adapter"})
"""The same tokens in four namespaces."""


def told(adapter: str, *flags: str) -> list[list[dict[str, Any]]]:
    """What the device stored for each of these requests, one behind the other."""
    from msgspec import structs
    from sglang.srt.disaggregation.kv_events import BlockStored

    ports, seen = Ports(), list[Any]()
    loras = adapter_flags({"adapter": adapter}, 2)
    core = Core(*loras, "--page-size", "16", *ports.flags, *flags, *SMALL, model=MODEL)
    publisher = core.scheduler.kv_events_publisher.kv_event_publisher
    publisher.publish = lambda batch: seen.extend(batch.events)
    found = []
    for one in ASKED:
        rid = core.submit(PROMPT, 4, lora=adapter_ids(core)["adapter"] if "lora" in one else None)
        core.inbox[-1].cache_salt, core.inbox[-1].extra_key = one.get("salt"), one.get("key")
        core.run()
        assert core.reply(rid).cached == 0

        def stored() -> list[Any]:
            return [e for e in seen if isinstance(e, BlockStored) and e.medium == "GPU"]

        until(stored, core.scheduler.kv_events_publisher.publish_kv_events)
        found.append([structs.asdict(event) for event in stored()])
        seen.clear()
    return found


@pytest.mark.slow
def test_of_the_device_they_are_sglangs_own(
    models: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But that an adapter's hashes are over its weights, where SGLang's are over its number."""
    adapter = write_adapter(tmp_path_factory.mktemp("events") / "adapter", 1, MODEL)
    ours = run_in_child(told, adapter, "--hc-forms", "kv")
    plain = run_in_child(told, adapter, "--hc-disable")
    assert ours[:3] == plain[:3] and all(ours)
    (mine,), (theirs,) = ours[3], plain[3]
    assert mine["block_hashes"] != ours[0][0]["block_hashes"]
    assert mine | {"block_hashes": theirs["block_hashes"]} == theirs
