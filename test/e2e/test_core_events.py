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


def engine(ports: Ports, *flags: str) -> Core:
    return Core("--hc-forms", "kv", "--page-size", "16", *ports.flags, *SMALL, *flags, model=MODEL)


def life_of_a_server(folder: str) -> dict[str, set[int]]:
    """A mirror of it agrees at every quiet point. Returns what it leaves on its disk."""
    ports = Ports(buffer_steps=3)
    core = engine(ports, *on_disk(folder))
    reader = Subscriber(ports)
    first = core.ask(PROMPT, 60).tokens
    settled(core, reader)
    assert all(reader.held[medium] for medium in ("GPU", "CPU_PINNED", "DISK"))

    core.evict()
    settled(core, reader)
    assert not reader.held["GPU"] and reader.held["CPU_PINNED"] and not reader.lost_from_device

    assert core.ask([*PROMPT, *first, *prompt(8, 70)], 40).cached
    for seed in range(20, 24):
        core.ask(prompt(seed, 150), 4)
    settled(core, reader)
    assert reader.events["BlockRemoved"] and not reader.lost_from_device
    core.tree.tiers.host.evict(3, 0.0)
    settled(core, reader)

    assert core.scheduler.flush_cache()
    settled(core, reader)
    assert reader.held["DISK"] and not reader.held["CPU_PINNED"] and not reader.held["GPU"]
    newcomer_learns_everything(core, ports)
    nobody_waits_for_a_publisher_that_hangs(core, reader)
    return truth(core)


def newcomer_learns_everything(core: Core, ports: Ports) -> None:
    """SGLang remembers three batches for replays; who asks for more gets all that there is."""
    newcomer = Subscriber(ports)
    newcomer.catch_up()
    settled(core, newcomer)
    assert newcomer.events["AllBlocksCleared"] and any(newcomer.held.values())
    newcomer.close()


def nobody_waits_for_a_publisher_that_hangs(core: Core, reader: Subscriber) -> None:
    """A batch that finds no room is dropped, and all that there is follows when there is room."""
    announcer, gate = core.tree.events._announcer, threading.Event()
    publisher = announcer.publisher

    class Hangs:
        def publish(self, batch: Any) -> None:
            gate.wait()
            publisher.publish(batch)

    announcer.publisher = Hangs()
    announcer._queue.maxsize = 2
    for seed in range(40, 45):
        core.ask(prompt(seed, 150), 4)
        publish(core)
    assert core.tree.stats()["kv_event_batches_dropped"]
    before = reader.events["AllBlocksCleared"]
    gate.set()
    settled(core, reader)
    assert reader.events["AllBlocksCleared"] > before
    announcer.publisher = publisher


def another_start(folder: str) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """What a mirror knows before the first request, and what there is."""
    ports = Ports()
    core = engine(ports, *on_disk(folder))
    reader = Subscriber(ports)
    reader.catch_up()
    settled(core, reader)
    return reader.held, truth(core)


def test_a_mirror_agrees_with_the_server_and_with_the_next_one(
    models: None, tmp_path: Path
) -> None:
    left = run_in_child(life_of_a_server, str(tmp_path / "d"))
    mirror, there = run_in_child(another_start, str(tmp_path / "d"))
    assert mirror == there and mirror["DISK"] == left["DISK"] != set()
    assert TIERS[1] == "DISK" and not mirror["CPU_PINNED"]
