"""This scheduler's place among those of the server, and its share of memory and disks.

Data-parallel replicas (`--dp-size`) have nothing to agree on. A conversation that returns to
another replica finds its state only in a remote store. The pipeline stages of a replica
(`--pp-size`) and the tensor-parallel ranks of each (`--tp-size`) hold the same blocks, each its own
part of them. The user's sizes are the server's, so each scheduler takes its part, and a folder of
its own on each disk.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sglang_hc.config import ConfigError, HcConfig, host_bytes
from sglang_hc.store.disk import DirectorySpec
from sglang_hc.store.disk.backend import DIRECTORY_MODE

RANK_FILE = "rank"
"""In a rank's folder: the name that the folder must have."""


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
    def folders(self) -> list[tuple[str, int]]:
        """Folders inside each other that lead to this scheduler's own, and how many stand side by
        side in each. The number of ranks is part of the name: other parts fit other numbers."""
        found = [(f"dp{self.replica}", self.replicas)] if self.replicas > 1 else []
        return [*found, *((f"{kind}{count}-{rank}", count) for kind, rank, count in self._ranks)]

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
    state = runner.ps
    return Place(
        state.dp_rank or 0,
        runner.server_args.dp_size,
        state.tp_rank,
        state.tp_size,
        state.pp_rank,
        state.pp_size,
    )


def host_share(config: HcConfig, place: Place) -> int:
    """Bytes of the scheduler's host tier."""
    return host_bytes(config, place.replicas * place.stages * place.shards)


def directories(config: HcConfig, place: Place) -> tuple[DirectorySpec, ...]:
    """The scheduler's directories, one for each `--hc-disk`: the user's own for the only one.

    Identities of blocks name no rank, so a rank's folder says in a file whose parts it holds.
    Raises ConfigError for a folder of another rank: somebody gave it another name.
    """
    specs = [DirectorySpec.parse(text) for text in config.disk]
    for name, count in place.folders:
        for spec in specs:
            with suppress(OSError):  # another was faster, or opening it will say what is wrong
                os.mkdir(spec.path, DIRECTORY_MODE)
        specs = [spec.for_user(name, count) for spec in specs]
    if place.part:
        for spec in specs:
            _claim(spec, place.part)
    return tuple(specs)


def _claim(spec: DirectorySpec, rank: str) -> None:
    """Write into an empty folder whose parts of blocks it is for. Raises ConfigError for a folder
    that is another rank's, or does not say whose it is."""
    file = Path(spec.path, RANK_FILE)
    try:
        with suppress(FileExistsError):
            os.mkdir(spec.path, DIRECTORY_MODE)
        if not os.listdir(spec.path):
            file.write_text(rank)
        found = file.read_text()
    except OSError as error:
        wrong = f"no file {file.name!r} says whose blocks these are ({error.strerror})"
    else:
        if found == rank:
            return
        wrong = f"the folder holds the blocks of {found}"
    raise ConfigError(
        f"--hc-disk {spec.path}: {wrong}; give it its name again, or delete it, which is only a "
        "cache"
    )
