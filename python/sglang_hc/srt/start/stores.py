"""What lies below host memory: directories and remote stores, of blocks and of end parts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from sglang_hc.config import ConfigError, shared_directory
from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.policy.planner import RestorePlanner
from sglang_hc.policy.writing import WriteAdmission, WriteRule
from sglang_hc.ranks.agreement import Ranks
from sglang_hc.srt.arguments.storage_backends import remote_key, remote_store
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.ranks.replicas import directories
from sglang_hc.srt.requests.self_test import is_of_test
from sglang_hc.srt.start.model import Model
from sglang_hc.store.block_io import BlockIo, LocalBlockIo
from sglang_hc.store.chain import Chain
from sglang_hc.store.disk import DirectoryError, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.format import part_of
from sglang_hc.store.disk.threads import DiskThreads
from sglang_hc.store.ends_below import EndsBelow
from sglang_hc.store.host_memory import HostMemory
from sglang_hc.store.host_pool import EndPool, HostPool
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.read_watch import not_observed
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.host_tier import HostTier

logger = logging.getLogger(__name__)


def lower_tier(
    model: Model, memory: HostMemory, fingerprint: bytes, host: HostTier, planner: RestorePlanner,
    counters: Counter[str], ranks: Ranks, ends: Ends | None,
) -> LowerTier | None:  # fmt: skip
    """Disk, a remote store, both, or nothing. Raises ConfigError."""
    opened = list(_stores(model, memory.pool, fingerprint, counters))
    below = _one_behind_another(model, opened, ranks, ends=False)
    if below is None:
        return None
    costs, seconds = planner.costs, planner.block_read_seconds
    on_read = partial(costs.observe_read, planner.plan) if costs is not None else not_observed
    admission = admission_of(model, memory, ranks)
    tier = LowerTier(below, host, ranks.clock, on_read, ranks.pause, seconds, admission, _is_kept)
    say = [one.named for one in opened if hasattr(one, "named")]  # directories alone say it
    tier.named = lambda block_id: next(filter(None, (named(block_id) for named in say)), None)
    if ends is not None and memory.ends is not None:
        own = ends.layout.fingerprint(fingerprint)
        parts = _stores(model, memory.ends, own, counters)
        io = _one_behind_another(model, parts, ranks, ends=True)
        assert io is not None
        kept = tier.keeps_end_of
        tier.ends = EndsBelow(io, ends, host, tier.coming, ranks.clock, kept, ranks.pause)
    return tier


def admission_of(model: Model, memory: HostMemory, ranks: Ranks) -> WriteAdmission | None:
    """What `--hc-write` lets through; None for everything. Ranks whose parts of a block are of
    different sizes decide alike: the budget is for all of them."""
    rule = WriteRule.parse(model.config.write)
    if rule is None:
        return None
    layout = memory.pool.layout
    parts = layout.ends.slot_bytes if layout.ends is not None else 0
    blocks, parts = (sum(model.state.group.each(size)) for size in (layout.slot_bytes, parts))
    return WriteAdmission(rule, blocks, ranks.clock(), parts)


def _is_kept(namespace: str | None) -> bool:
    """Whether what is in a namespace goes below host memory."""
    return not is_of_test(namespace)


def _one_behind_another(
    model: Model, stores: Iterable[LocalBlockIo], ranks: Ranks, *, ends: bool
) -> BlockIo | None:
    """As all ranks use them. ends: they are of end parts."""
    below: BlockIo | None = None
    for own in stores:
        capacity = model.state.group.least(own.capacity)
        one = KnownBlocks(ranks.blocks(own, capacity, ends=ends), ranks.clock)
        below = one if below is None else Chain(below, one)
    return below


def _stores(
    model: Model, pool: HostPool | EndPool, fingerprint: bytes, counters: Counter[str]
) -> Iterator[LocalBlockIo]:
    """Those of `--hc-disk` and `--hc-remote`, of this rank's parts of what is in `pool`."""
    config, place = model.config, model.place
    label, chunks = arguments.served_name(arguments.of(model.runner)), pool.layout.chunks()
    part, upkeep = part_of(fingerprint, place.part), Upkeep(config.ttl or None)
    stored = partial(StoredModel.of, chunks, fingerprint, label, part)

    def opened(flag: str, paths: Sequence[str], tier: SourceTier, key: Any = None) -> DiskThreads:
        try:
            folders = directories(paths, place)
            store = DiskStore.open(folders, stored(key), upkeep)
        except DirectoryError as error:
            raise ConfigError(str(error).replace("--hc-disk", flag)) from None
        except OSError as error:
            raise ConfigError(f"{flag}: {error}") from None
        where = ", ".join(folder.path for folder in folders)
        logger.info("sglang-hc: %s tier in %s", tier.value, where)
        return DiskThreads(store, pool, counters, tier=tier)

    if config.disk:
        yield opened("--hc-disk", config.disk, SourceTier.DISK)
    shared = shared_directory(config)
    if shared is not None:
        yield opened("--hc-remote file", [shared], SourceTier.REMOTE, remote_key(config))
    elif config.remote is not None:
        yield remote_store(config, pool, stored(remote_key(config)), counters)
