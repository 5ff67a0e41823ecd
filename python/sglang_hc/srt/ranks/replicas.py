"""This scheduler's place among those of the server, and its share of memory and disks.

Data-parallel replicas (`--dp-size`) have nothing to agree on: they find each other's blocks on the
disks that they share. The pipeline stages of a replica (`--pp-size`) and the tensor-parallel ranks
of each (`--tp-size`) hold the same blocks, each its own part of them, under a name of its own. The
user's sizes are the server's, so each scheduler takes its part of host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang_hc.config import HcConfig, host_bytes
from sglang_hc.srt.binding import arguments, parallel
from sglang_hc.store.disk import DirectorySpec


class Place(NamedTuple):
    """Tensor-parallel rank `shard` of the `shards` of stage `stage` of the `stages` that serve
    replica `replica` of `replicas`."""

    replica: int
    replicas: int
    shard: int
    shards: int
    stage: int = 0
    stages: int = 1

    @property
    def part(self) -> str:
        """Which part of each block it holds; empty where it holds whole blocks."""
        return "/".join(f"{kind}{count}-{rank}" for kind, rank, count in self._ranks)

    @property
    def suffix(self) -> str:
        """Behind the names of its files; empty for the only scheduler of a server."""
        replica = f".dp{self.replica}" if self.replicas > 1 else ""
        return replica + "".join(f".{kind}{rank}" for kind, rank, _ in self._ranks)

    @property
    def _ranks(self) -> list[tuple[str, int, int]]:
        """(kind, number, how many) where there are several."""
        ranks = ("pp", self.stage, self.stages), ("tp", self.shard, self.shards)
        return [rank for rank in ranks if rank[2] > 1]


def place_of(runner: Any) -> Place:
    """Which scheduler a model runner belongs to."""
    return Place(
        parallel.dp_rank(),
        arguments.replicas(arguments.of(runner)),
        parallel.tp_rank(),
        parallel.tp_size(),
        parallel.pp_rank(),
        parallel.pp_size(),
    )


def host_share(config: HcConfig, place: Place) -> int:
    """Bytes of the scheduler's host tier."""
    return host_bytes(config, place.replicas * place.stages * place.shards)


def directories(texts: Sequence[str], place: Place) -> tuple[DirectorySpec, ...]:
    """Directories of the server, which all its schedulers share. Raises DirectoryError."""
    users = place.shards * place.stages
    return tuple(DirectorySpec.parse(text, users) for text in texts)
