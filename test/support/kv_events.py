"""Somebody who reads the KV events of a server as a router does: a subscription, replays for what
was missed, and a mirror of what the server holds."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import zmq

from benchmark.harness.server import free_port
from support.disk_store import store_of
from support.waiting import until

MEDIA = ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")
TIERS = MEDIA[1:]


class Ports:
    """Where a server's first rank publishes, and answers replays."""

    def __init__(self, **config: Any) -> None:
        """config: more of `--kv-events-config`."""
        self.events, self.replays = free_port(), free_port()
        self._config = config

    def address(self, rank: int = 0) -> str:
        return f"tcp://127.0.0.1:{self.events + rank}"

    def replay_address(self, rank: int = 0) -> str:
        return f"tcp://127.0.0.1:{self.replays + rank}"

    @property
    def flags(self) -> tuple[str, str]:
        config = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replays}",
            **self._config,
        }
        return "--kv-events-config", json.dumps(config)


class Subscriber:
    """held: hashes of pages by medium. events: how many of each kind came. lost_from_device:
    of the pages that left the device in a batch, those that no medium had behind it."""

    def __init__(self, ports: Ports, rank: int = 0) -> None:
        self.held: dict[str, set[int]] = {medium: set() for medium in MEDIA}
        self.events: Counter[str] = Counter()
        self.lost_from_device: set[int] = set()
        self.replays = 0
        self._next = 0
        self._replays = ports.replay_address(rank)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(ports.address(rank))
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")

    def read(self) -> None:
        """Take in what has come; ask again for what is missing."""
        while self._socket.poll(20):
            _, seq, payload = self._socket.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self._next:
                self.catch_up()
            if number >= self._next:
                self._take(number, payload)

    def catch_up(self) -> None:
        """Replay what came since the last batch that was read."""
        self.replays += 1
        with zmq.Context.instance().socket(zmq.DEALER) as socket:
            socket.connect(self._replays)
            socket.send_multipart([b"", self._next.to_bytes(8, "big")])
            while True:
                *_, seq, payload = socket.recv_multipart()
                number = int.from_bytes(seq, "big", signed=True)
                if number < 0:
                    return
                self._take(number, payload)

    def _take(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        _, events, _ = msgspec.msgpack.decode(payload)
        left: set[int] = set()
        for event in events:
            self.events[event["type"]] += 1
            if event["type"] == "AllBlocksCleared":
                for pages in self.held.values():
                    pages.clear()
            elif event["type"] == "BlockStored":
                hashes, size = event["block_hashes"], event["block_size"]
                assert len(event["token_ids"]) == len(hashes) * size
                self.held[event["medium"]] |= set(hashes)
            else:
                self.held[event["medium"]] -= set(event["block_hashes"])
                if event["medium"] == "GPU":
                    left |= set(event["block_hashes"])
        self.lost_from_device |= left - set().union(*self.held.values())

    def close(self) -> None:
        self._socket.close(0)


def publish(core: Any, *, poll: bool = True) -> None:
    """Let a core announce all that it has noted. poll: take in completions before, which several
    ranks do in their passes alone."""
    if poll:
        core.tree.tiers.poll()
    core.scheduler.kv_events_publisher.publish_kv_events()


def settled(core: Any, subscriber: Subscriber, *, poll: bool = True) -> None:
    """Wait until a subscriber knows what a core holds; fails where it never does. poll: see
    `publish`; without it the core has settled before."""
    if poll:
        core.settle()

    def agree() -> bool:
        publish(core, poll=poll)
        subscriber.read()
        return subscriber.held == truth(core)

    until(agree, pause=0.01, show=lambda: difference(subscriber.held, truth(core)))


def difference(found: dict[str, set[int]], wanted: dict[str, set[int]]) -> dict[str, Any]:
    return {
        medium: (len(found[medium] - wanted[medium]), len(wanted[medium] - found[medium]))
        for medium in MEDIA
    }


def truth(core: Any) -> dict[str, set[int]]:
    """Hashes of what the tree and the tiers of a core hold of the weights of now, worked out from
    whole paths."""
    tree, page = core.tree, core.tree.page_size
    held: dict[str, set[int]] = {medium: set() for medium in MEDIA}
    for node in tree.nodes():
        if not tree.weights.made(node.key.extra_key):
            continue
        path: list[int] = []
        above = node
        while len(above.key):
            path = [*above.key, *path]
            above = above.parent
        held["GPU"] |= path_hashes(path, page)
    for block in tree.tiers.host.tree.nodes():
        if not tree.weights.made(block.namespace):
            continue
        tokens = b"".join(one.tokens for one in block.path())
        held["CPU_PINNED"] |= path_hashes(_ids(tokens), page)
    if tree.tiers.disk is not None and "disk_blocks" in tree.tiers.disk.levels():
        store = store_of(core)
        known = ((name, store.named(name)) for name in store.block_ids())
        named = {
            name: one for name, one in known if one and tree.weights.made(one.namespace or None)
        }
        for block in named.values():
            tokens, one = b"", block
            while one is not None:
                tokens = one.tokens + tokens
                one = named.get(one.parent_id) if one.position else None
            held["DISK"] |= path_hashes(_ids(tokens), page)
    return held


def _ids(tokens: bytes) -> list[int]:
    return [int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4)]


def path_hashes(tokens: Sequence[int], page: int) -> set[int]:
    """Of the whole pages of a path without a namespace, as SGLang names them in events."""
    from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

    whole = array("q", tokens[: len(tokens) // page * page])
    found: Iterable[str] = get_hash_str(whole, None, page_size=page) if whole else ()
    return set(map(hash_str_to_int64, found))
