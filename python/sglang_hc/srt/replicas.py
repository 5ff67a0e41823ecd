"""Data-parallel replicas (`--dp-size`): what one of them has of the server's memory and disks.

Each replica is a scheduler of its own, with its own tiers: nothing has to be agreed on. The user's
sizes are the server's, so each replica takes its part, and a folder of its own on each disk. A
conversation that returns to another replica finds its state only in a remote store.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NamedTuple

from sglang_hc.config import HcConfig, host_bytes
from sglang_hc.store.disk import DirectorySpec
from sglang_hc.store.disk.backend import DIRECTORY_MODE


class Replica(NamedTuple):
    """One of `count` schedulers that serve the same model side by side."""

    rank: int
    count: int

    @property
    def name(self) -> str:
        """Of its folder, and behind the names of its files."""
        return f"dp{self.rank}"


def replica_of(runner: Any) -> Replica:
    """Which replica a model runner belongs to."""
    return Replica(runner.ps.dp_rank or 0, runner.server_args.dp_size)


def host_share(config: HcConfig, replica: Replica) -> int:
    """Bytes of the replica's host tier."""
    return host_bytes(config) // replica.count


def directories(config: HcConfig, replica: Replica) -> tuple[DirectorySpec, ...]:
    """The replica's directories, one for each `--hc-disk`: the user's own for a single replica."""
    specs = tuple(DirectorySpec.parse(text) for text in config.disk)
    if replica.count == 1:
        return specs
    for spec in specs:
        with suppress(OSError):  # another replica was faster, or opening it will say what is wrong
            os.mkdir(spec.path, DIRECTORY_MODE)
    return tuple(spec.for_user(replica.name, replica.count) for spec in specs)
