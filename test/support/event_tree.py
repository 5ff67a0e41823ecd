"""A tree with KV events, its tiers, and somebody who reads them."""

from __future__ import annotations

import atexit
from array import array
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import EventPublisherFactory
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.events import KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmark.hooks.parts import CPU, cache_params, fill, scheduler_with, tiers_of
from sglang_hc.restore.prerestored import PrerestoredBlocks
from sglang_hc.srt.engine.streams import ComputeStream
from sglang_hc.srt.model.weight_versions import WeightVersions
from sglang_hc.srt.ranks.start_group import StartGroup
from sglang_hc.srt.tree.device_tree import readable
from sglang_hc.srt.tree.events import Events
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import pack_tokens
from support.kv_events import Ports, Subscriber, settled

PAGE = 16


def event_params() -> Any:
    return replace(
        cache_params(), page_size=PAGE, enable_kv_cache_events=True,
        kv_event_lora_names=KvEventLoraNames(),
    )  # fmt: skip


class World:
    """A tree whose events somebody reads."""

    def __init__(
        self, disk: object = None, ports: Ports | None = None,
        changed: dict[str, bool] | None = None, **config: Any,
    ) -> None:  # fmt: skip
        """disk: a directory below host memory; None for none. ports: of a server that has ended.
        changed: parameters of the tree. config: more of `--kv-events-config`."""
        self.ports, self.counters = ports or Ports(**config), Counter[str]()
        self.publisher = EventPublisherFactory.create(self.ports.flags[1])
        params = replace(event_params(), **(changed or {}))
        self.tiers = tiers_of(64)
        if disk is not None:
            self.tiers.disk = disk_below(self.tiers, str(disk))
        told = Events(params, self.tiers.host, self.tiers.disk, self.counters)
        self.tiers.residence = told.residence
        own, compute = scheduler_with(0), ComputeStream(CPU)
        own.event_publisher, own.requests = self.publisher, []
        ahead = PrerestoredBlocks(params.token_to_kv_pool_allocator, self.tiers.restorer, compute)
        self.tree = HcRadixCache(
            readable(params, None), self.tiers, own, compute, ahead,
            WeightVersions(StartGroup(0, 1)), events=told,
        )  # fmt: skip
        self.scheduler = SimpleNamespace(
            kv_events_publisher=SimpleNamespace(publish_kv_events=self.tree.take_events)
        )
        self.reader = Subscriber(self.ports)

    def settle(self) -> None:
        """For `kv_events.settled`, which takes this for an engine."""
        if self.tiers.disk is not None:
            self.tiers.disk.drain()

    def say(self, tokens: list[int], namespace: str | None = None) -> None:
        """A path comes to the device and to host memory."""
        key = RadixKey(array("q", tokens), namespace)
        self.tree.insert(InsertParams(key, torch.arange(len(tokens))))
        fill(self.tiers, namespace, pack_tokens(tokens))
        for node in self.tiers.host.tree.nodes() if self.tiers.disk is not None else ():
            self.tiers.disk.write_through(node)

    def agree(self) -> None:
        settled(self, self.reader)

    def close(self) -> None:
        self.tree.events.close()
        self.publisher.shutdown()
        atexit.unregister(self.publisher.shutdown)
        self.reader.close()
        if self.tiers.disk is not None:
            self.tiers.disk.close()


def disk_below(tiers: Tiers, folder: str) -> LowerTier:
    """A store of real files, whose upkeep is done by whoever calls `tick`."""
    pool, counters = tiers.restorer.path.pool, Counter[str]()
    fingerprint = tiers.host.tree.fingerprint
    model = StoredModel.of(pool.layout.chunks(), fingerprint, "tiny")
    spec = DirectorySpec(folder, 80 * model.file_bytes)
    store = DiskStore.open([spec], model, Upkeep(background=False))
    below = LowerTier(KnownBlocks(DiskThreads(store, pool, counters)), tiers.host)
    below.named = store.named
    return below
