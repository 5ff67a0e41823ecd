"""What one scheduler has of the server's sizes and disks: a replica, and a rank of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.server_args import ServerArgs

from sglang_hc.config import GIB, HcConfig
from sglang_hc.srt.ranks.replicas import Place, directories, host_share, place_of
from sglang_hc.store.disk import DirectorySpec, DiskStore, Outcome, StoredModel
from sglang_hc.store.disk.format import part_of
from support.disk_store import FINGERPRINT, LAYOUT, SMALL, make_path, put, read_bytes
from support.start_groups import as_rank


def test_a_single_server_keeps_what_the_user_gave(tmp_path: Path) -> None:
    runner = SimpleNamespace(server_args=ServerArgs(model_path="dummy"))
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path}:3", str(tmp_path)))
    with as_rank(dp_rank=None, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        alone = place_of(runner)
    assert host_share(config, alone) == GIB
    assert directories(config.disk, alone) == tuple(map(DirectorySpec.parse, config.disk))
    assert alone.part == alone.suffix == "" and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("replicas", "shards", "stages"),
    [(2, 1, 1), (3, 1, 1), (8, 1, 1), (1, 2, 1), (1, 8, 1), (2, 4, 1), (1, 1, 2), (2, 2, 3)],
)
def test_memory_is_divided_and_the_directories_are_everybodys(
    tmp_path: Path, replicas: int, shards: int, stages: int
) -> None:
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path / 'ssd'}:5", str(tmp_path / "rest")))
    places = [
        Place(replica, replicas, shard, shards, stage, stages)
        for replica in range(replicas)
        for shard in range(shards)
        for stage in range(stages)
    ]
    assert 0.9 * GIB < sum(host_share(config, one) for one in places) <= GIB
    assert len({one.suffix for one in places}) == len(places)
    assert len({one.part for one in places}) == shards * stages, "replicas find each other's blocks"
    (specs,) = {directories(config.disk, one) for one in places}
    assert specs == (
        DirectorySpec(str(tmp_path / "ssd"), 5 * 10**9, shards * stages),
        DirectorySpec(str(tmp_path / "rest"), None, shards * stages),
    )


def test_a_part_names_the_rank_and_how_many_there_are() -> None:
    """Another number of ranks has other parts of the blocks: they must not meet."""
    assert Place(1, 2, 0, 2).part == Place(0, 1, 0, 2).part == "tp2-0"
    assert Place(0, 1, 0, 4).part == "tp4-0" and Place(0, 1, 1, 2, 0, 3).part == "pp3-0/tp2-1"
    assert Place(0, 1, 1, 4).suffix == ".tp1" and Place(1, 2, 3, 4).suffix == ".dp1.tp3"
    assert Place(0, 1, 0, 1, 2, 3).suffix == ".pp2"


def rank(folder: Path, shard: int) -> DiskStore:
    """The store of one of two ranks, as `srt/start/build.py` opens it."""
    part = part_of(FINGERPRINT, Place(0, 1, shard, 2).part)
    model = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny", part)
    return DiskStore.open((DirectorySpec(str(folder), SMALL, 2),), model)


def test_a_ranks_part_is_served_to_no_other_rank(tmp_path: Path) -> None:
    """The identities of their blocks are the same, and so is the directory."""
    blocks, (first, second) = make_path(2), (rank(tmp_path, shard) for shard in (0, 1))
    assert put(first, blocks) == [Outcome.OK] * 2
    name = blocks[0].block_id
    assert not second.contains([name]) and not second.find(name)
    assert read_bytes(second, name)[0] is Outcome.MISSING
    for store in (first, second):
        store.tick()
    assert first.contains([name]) and not second.contains([name]), "nor after a look at the disk"
    (ours,), (theirs,) = first.directories, second.directories
    target = Path(theirs.path(name))
    target.parent.mkdir(parents=True)
    shutil.copy(ours.path(name), target)  # by hand
    theirs.find_others()
    assert second.contains([name]) and read_bytes(second, name)[0] is Outcome.DAMAGED
    assert not second.contains([name]) and read_bytes(first, name)[0] is Outcome.OK
    for store in (first, second):
        store.close()
