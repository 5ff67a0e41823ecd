"""KV events of a tree and its tiers over SGLang's own publisher, read as a router reads them."""

from __future__ import annotations

import socket
import threading
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.srt.tree import events
from sglang_hc.srt.tree.device_tree import readable
from sglang_hc.srt.tree.events import (
    CLIPPED_BYTES,
    EVENTS_AT_ONCE,
    FOUND_AT_ONCE,
    Announcer,
)
from sglang_hc.store.block import Block
from sglang_hc.store.block_io import Change
from sglang_hc.store.disk.directory import steady_time
from sglang_hc.tiers.residence import Anew
from sglang_hc.tree.forgetting import Forgetting
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import Namespace
from support.disk_store import store_of
from support.event_tree import PAGE, World, event_params
from support.kv_events import Ports, Subscriber, settled
from support.prompts import prompt
from support.router import Router, needs_router
from support.waiting import until


@pytest.fixture
def world() -> Iterator[World]:
    made = World(buffer_steps=3)
    yield made
    made.close()


def test_what_leaves_the_device_is_still_in_host_memory(world: World) -> None:
    world.say(prompt(1, 200))
    world.say([*prompt(1, 100), *prompt(2, 100)])
    world.agree()
    assert world.reader.held["GPU"] and world.reader.held["CPU_PINNED"]
    world.tree.evict(EvictParams(num_tokens=1000))
    world.agree()
    assert not world.reader.held["GPU"] and not world.reader.lost_from_device
    world.tiers.host.evict(3, 0.0)
    world.agree()
    assert world.reader.held["CPU_PINNED"] and world.reader.events["AllBlocksCleared"] == 1


def test_a_flush_is_told_from_nothing(world: World) -> None:
    world.say(prompt(1, 200))
    world.agree()
    world.tree.reset()
    world.agree()
    assert world.reader.events["AllBlocksCleared"] == 2


def test_who_asks_for_more_than_is_remembered_gets_all_that_there_is(world: World) -> None:
    for seed in range(8):
        world.say(prompt(seed, 100))
        world.agree()
    late = Subscriber(world.ports)
    late.catch_up()
    settled(world, late)
    assert late.events["AllBlocksCleared"] and world.counters["kv_event_snapshots"] == 1
    late.close()


def test_nobody_waits_for_a_publisher_that_hangs(world: World) -> None:
    """A batch without room is dropped; when there is room again, all that there is follows."""
    world.agree()
    gate, announcer = threading.Event(), world.tree.events._announcer
    announcer.publisher = SimpleNamespace(
        publish=lambda batch: gate.wait() and world.publisher.publish(batch)
    )
    announcer._queue.maxsize = 2
    for seed in range(8):
        world.say(prompt(seed, 100))
        world.tree.take_events()
    assert world.counters["kv_event_batches_dropped"]
    gate.set()
    world.agree()
    assert world.reader.events["AllBlocksCleared"] > 1


def test_after_an_error_all_is_told_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "AFTER_ERROR_S", 0.0)
    world.say(prompt(1, 100))
    world.agree()
    announcer = world.tree.events._announcer
    announcer.publisher = SimpleNamespace()
    world.say(prompt(2, 100))
    until(lambda: world.counters["kv_event_errors"], world.tree.take_events)
    announcer.publisher = world.publisher
    world.agree()
    assert world.reader.events["AllBlocksCleared"] > 1


def test_after_errors_not_every_pass_looks_at_all(world: World) -> None:
    world.agree()
    announcer = world.tree.events._announcer
    announcer.publisher = SimpleNamespace()
    world.say(prompt(1, 100))
    until(lambda: announcer.failed, world.tree.take_events)

    def all_nodes() -> Iterator[Any]:
        raise AssertionError("it is looked at again at once")
        yield

    world.tree.events.hand_over(world.publisher, all_nodes())


def test_what_was_asked_for_before_all_is_told_anew_is_not_read() -> None:
    """Each batch that was dropped made the reader read the whole disk once more."""
    gate, read, seen = threading.Event(), list[bytes](), list[Any]()

    def named(block_id: bytes) -> None:
        gate.wait()
        read.append(block_id)

    announcer = Announcer(SimpleNamespace(page_size=PAGE), named, Counter())
    announcer.publisher = SimpleNamespace(publish=seen.append)
    there = [Change(SourceTier.DISK, bytes([n] * 16), True) for n in range(200)]
    for _ in range(3):
        announcer.offer([Anew(), *there])
    announcer.close()
    gate.set()
    assert announcer._reader.close(10.0) and len(seen) == 3
    assert set(read) == {one.block_id for one in there}
    assert len(read) <= len(there) + FOUND_AT_ONCE


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, []), (EVENTS_AT_ONCE, [256]), (EVENTS_AT_ONCE + 1, [256, 1])]
)
def test_a_batch_has_so_many_events_at_most(count: int, sizes: list[int]) -> None:
    assert [len(batch) for batch in events._batches(range(count))] == sizes


@pytest.mark.parametrize(("length", "found"), [(CLIPPED_BYTES, 1), (CLIPPED_BYTES + 1, 0)])
def test_a_label_that_may_be_cut_off_names_nobody(length: int, found: int) -> None:
    label = "ä" * (length // 2) + "x" * (length % 2)
    block = Block(bytes(16), bytes(16), label, 0, pack_tokens([1] * 64))
    announcer = Announcer(SimpleNamespace(page_size=PAGE), lambda block_id: block, Counter())
    assert len([*announcer._found([block.block_id])]) == found
    announcer.close()


def test_state_of_the_weights_of_now_alone_is_told(tmp_path: Path) -> None:
    """On the device and in each tier; and again when they come back."""
    world = World(disk=tmp_path / "d")
    names = [Namespace(weights=weights).pack() for weights in (None, "b")]
    digests = iter("aba")
    world.tree.weights._digest = lambda: next(digests)
    for number in (0, 1):
        world.say(prompt(1, 200), names[number])
        world.agree()
        media = [medium for medium, held in world.reader.held.items() if held]
        assert sorted(media) == ["CPU_PINNED", "DISK", "GPU"]
        with world.tree.weights_change(list):
            pass
        world.tree.weights_settled()
        world.agree()
        assert any(world.reader.held.values()) == (number == 1)
    world.close()


def test_pins_end_when_their_weights_are_gone_and_stay_when_nothing_changed(world: World) -> None:
    pins, digests = world.tiers.retention.pins, iter("aabba")
    world.tree.weights._digest = lambda: next(digests)
    found = []
    for name in (None, None, Namespace(weights="b").pack(), None):
        world.say(prompt(1, 200), name)
        world.tiers.drain()
        world.tiers.retention.pin(Prefix(name, pack_tokens(prompt(1, 200))), "s", 60.0)
        world.tiers.retention.pin(Prefix(name, pack_tokens(prompt(1, 128))), "t", 60.0)
        with world.tree.weights_change(list):
            assert len(pins) == 2
        world.tree.weights_settled()
        found.append((world.tree.version, len(pins)))
        pins.check_integrity()
    assert found == [(None, 2), ("b", 0), ("b", 2), (None, 2)]


def test_what_is_forgotten_while_it_is_in_use_is_told_gone(world: World) -> None:
    name = Namespace(key="k").pack()
    world.say(prompt(1, 128), name)
    world.agree()
    (leaf,) = [node for node in world.tree.nodes() if not node.children]
    lock = world.tree.lock(leaf.id)
    world.tree.forget(Forgetting(name), lambda answer: None)
    until(lambda: not any(world.reader.held.values()), lambda: read_on(world))
    world.tree.unlock(lock)
    world.tree.evict(EvictParams(num_tokens=1000))
    world.agree()


def read_on(world: World) -> None:
    world.tree.take_events()
    world.reader.read()


@pytest.mark.parametrize(
    ("changed", "image"),
    [({}, 0), ({}, 1 << 61), ({"dynamo_kv_event_format": True}, 0), ({"is_eagle": True}, 0)],
    ids=["", "images", "dynamo", "drafts"],
)
def test_the_device_is_told_as_by_sglang(changed: dict[str, bool], image: int) -> None:
    """With salts and keys of clients, ids that stand for an image and have 62 bits, and keys that
    count pairs of tokens."""
    world, tokens, seen = World(changed=changed), prompt(1, 65), list[Any]()
    tokens[20] += image
    stock = UnifiedRadixCache(readable(replace(event_params(), **changed), None))
    assert (world.tiers.residence is None) == ("is_eagle" in changed)
    world.publisher.publish = lambda batch: seen.extend(batch.events)
    for salt, key in ((None, None), ("s", None), (None, "k"), ("s", "k")):
        ours = RadixKey(array("q", tokens), Namespace(salt, key).pack())
        theirs = RadixKey(array("q", tokens), key, cache_salt=salt)
        world.tree.insert(InsertParams(ours, torch.arange(65)))
        stock.insert(InsertParams(theirs, torch.arange(65)))
        until(lambda: stored_on_device(seen), world.tree.take_events)
        (mine,) = stored_on_device(seen)
        assert mine == stock.take_events()[-1] and len(mine.block_hashes) == 4
        seen.clear()
    world.close()


def test_a_restart_is_a_gap_for_those_who_listen_on(tmp_path: Path) -> None:
    first = World(tmp_path)
    first.say(prompt(1, 200))
    first.agree()
    reader, before = first.reader, first.reader.replays
    left = reader.held["DISK"].copy()
    first.publisher.shutdown()
    until(lambda: are_free(first.ports))  # sockets are closed by a thread
    second, seeds = World(tmp_path, first.ports), count(2)

    def go_on() -> None:
        """Until the listener is connected again."""
        second.say(prompt(next(seeds), 64))
        read_on(second)
        reader.read()

    until(lambda: reader.replays > before, go_on, pause=0.05)
    settled(second, reader)
    assert left <= reader.held["DISK"] and not left & reader.held["CPU_PINNED"]
    first.tiers.disk.close()
    second.close()
    reader.close()


def are_free(ports: Ports) -> bool:
    for port in (ports.events, ports.replays):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True


def stored_on_device(events: list[Any]) -> list[Any]:
    return [one for one in events if getattr(one, "token_ids", None) and one.medium == "GPU"]


def test_a_restarted_server_announces_what_its_disk_holds(tmp_path: Path) -> None:
    """And what fills and empties the disk meanwhile: another server, eviction, the clearing of
    everything."""
    first = World(tmp_path)
    first.say(prompt(1, 200))
    first.agree()
    left = first.reader.held["DISK"].copy()
    assert len(left) == 3 * 64 // PAGE
    second = World(tmp_path)
    second.agree()
    assert second.reader.held["DISK"] == left and not second.reader.held["CPU_PINNED"]

    second.say([*prompt(1, 128), *prompt(2, 128)])
    second.agree()
    for world in (first, second):
        clock = store_of(world).directories[0]
        clock.clock = lambda: steady_time() + 60.0
        store_of(world).tick()
    first.agree()
    assert first.reader.held["DISK"] == second.reader.held["DISK"] > left

    for seed in range(3, 60):
        second.say(prompt(seed, 128))
        second.settle()
        second.tiers.host.evict(60, 0.0)
    second.agree()
    assert len(second.reader.held["DISK"]) == 4 * 80
    second.tree.clear_storage_backend()
    second.agree()
    assert not second.reader.held["DISK"]
    first.close()
    second.close()


@pytest.mark.slow
def test_a_published_router_follows_a_prefix_through_the_tiers(tmp_path: Path) -> None:
    """Of two replicas it chooses the one that has it, in whichever tier; in the nearest it counts
    most."""
    needs_router()
    worlds = [World(tmp_path / str(number)) for number in (0, 1)]
    tokens = prompt(1, 128)
    with Router(tmp_path / "log") as router:
        for number, world in enumerate(worlds):
            router.register(
                "tiers", number, world.ports.address(), world.ports.replay_address(), PAGE
            )
        worlds[1].say(tokens)

        def found(tier: str, blocks: int) -> None:
            worlds[1].agree()
            until(lambda: router.known("tiers", tokens)[1][tier] == blocks, pause=0.02)
            assert router.choose("tiers", tokens) == 1

        found("device_blocks", 8)
        worlds[1].tree.evict(EvictParams(num_tokens=1000))
        found("device_blocks", 0)
        found("host_pinned_extension_blocks", 8)
        worlds[1].tiers.host.evict(60, 0.0)
        found("host_pinned_extension_blocks", 0)
        found("disk_extension_blocks", 8)
        assert router.known("tiers", tokens)[0]["disk_blocks"] == 0
    for world in worlds:
        world.close()
