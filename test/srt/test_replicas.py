"""What one scheduler has of the server's sizes: a replica, and a rank of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hc.config import GIB, ConfigError, HcConfig
from sglang_hc.srt.replicas import Place, directories, host_share, place_of
from sglang_hc.store.disk import DirectorySpec


def test_a_single_server_keeps_what_the_user_gave(tmp_path: Path) -> None:
    ps = SimpleNamespace(dp_rank=None, tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
    runner = SimpleNamespace(ps=ps, server_args=SimpleNamespace(dp_size=1))
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path}:3", str(tmp_path)))
    alone = place_of(runner)
    assert host_share(config, alone) == GIB
    assert directories(config, alone) == tuple(map(DirectorySpec.parse, config.disk))
    assert alone.suffix == "" and not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("replicas", "shards", "stages"),
    [(2, 1, 1), (3, 1, 1), (8, 1, 1), (1, 2, 1), (1, 8, 1), (2, 4, 1), (1, 1, 2), (2, 2, 3)],
)
def test_all_together_use_no_more_than_was_given(
    tmp_path: Path, replicas: int, shards: int, stages: int
) -> None:
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path / 'ssd'}:5", str(tmp_path / "rest")))
    places = [
        Place(replica, replicas, shard, shards, stage, stages)
        for replica in range(replicas)
        for shard in range(shards)
        for stage in range(stages)
    ]
    count = len(places)
    assert sum(host_share(config, one) for one in places) <= GIB
    specs = [directories(config, one) for one in places]
    assert len({spec.path for both in specs for spec in both}) == 2 * count
    assert len({one.suffix for one in places}) == count
    assert GIB > sum(both[0].size_bytes or 0 for both in specs) / 5 > 0.9 * 10**9
    assert all(both[1] == DirectorySpec(both[1].path, None, count) for both in specs)
    assert all(Path(spec.path).parent.is_dir() for both in specs for spec in both)


def test_the_folder_names_the_number_of_ranks(tmp_path: Path) -> None:
    """Another number of ranks has other parts of the blocks: they must not meet."""
    config = HcConfig(disk=(str(tmp_path),))
    (spec,) = directories(config, Place(1, 2, 0, 2))
    assert spec.path == str(tmp_path / "dp1" / "tp2-0")
    assert directories(config, Place(1, 2, 0, 2)) == (spec,), "the next start finds it"
    assert Place(0, 1, 1, 4).suffix == ".tp1" and Place(1, 2, 3, 4).suffix == ".dp1.tp3"
    (spec,) = directories(config, Place(0, 1, 1, 2, 0, 3))
    assert spec.path == str(tmp_path / "pp3-0" / "tp2-1")
    assert Place(0, 1, 0, 1, 2, 3).suffix == ".pp2"


def test_a_folder_of_another_rank_is_refused(tmp_path: Path) -> None:
    """Its blocks have the identities of this rank's: only the folder tells them apart."""
    config = HcConfig(disk=(str(tmp_path),))
    first, second = (Place(0, 1, rank, 2) for rank in (0, 1))
    for place in (first, second):
        directories(config, place)
    (tmp_path / "tp2-0").rename(tmp_path / "kept")
    (tmp_path / "tp2-1").rename(tmp_path / "tp2-0")
    with pytest.raises(ConfigError, match="tp2-0: the folder holds the blocks of tp2-1"):
        directories(config, first)
    (tmp_path / "tp2-0").rename(tmp_path / "tp2-1")
    (tmp_path / "kept").rename(tmp_path / "tp2-0")
    assert [directories(config, place)[0].path[-1] for place in (first, second)] == ["0", "1"]
    directories(config, Place(0, 1, 1, 2, 1, 2))
    (tmp_path / "pp2-1").rename(tmp_path / "pp2-0")
    with pytest.raises(ConfigError, match="the folder holds the blocks of pp2-1/tp2-1"):
        directories(config, Place(0, 1, 1, 2, 0, 2))


def test_a_folder_is_claimed_while_it_is_empty(tmp_path: Path) -> None:
    """A start that ended early leaves it empty. Blocks of an unknown rank are refused."""
    config, place = HcConfig(disk=(str(tmp_path),)), Place(0, 1, 0, 2)
    (tmp_path / "tp2-0").mkdir()
    directories(config, place)
    (tmp_path / "tp2-0" / "blocks").touch()
    assert directories(config, place)
    (tmp_path / "tp2-0" / "rank").unlink()
    with pytest.raises(ConfigError, match="tp2-0: no file 'rank' says whose blocks these are"):
        directories(config, place)
