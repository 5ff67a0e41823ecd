"""What one data-parallel replica has of the server's sizes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hc.config import GIB, HcConfig
from sglang_hc.srt.replicas import Replica, directories, host_share, replica_of
from sglang_hc.store.disk import DirectorySpec


def test_a_single_server_keeps_what_the_user_gave(tmp_path: Path) -> None:
    runner = SimpleNamespace(
        ps=SimpleNamespace(dp_rank=None), server_args=SimpleNamespace(dp_size=1)
    )
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path}:3", str(tmp_path)))
    alone = replica_of(runner)
    assert host_share(config, alone) == GIB
    assert directories(config, alone) == tuple(map(DirectorySpec.parse, config.disk))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("count", [2, 3, 8])
def test_replicas_together_use_no_more_than_was_given(tmp_path: Path, count: int) -> None:
    config = HcConfig(host_size_gb=1.0, disk=(f"{tmp_path / 'ssd'}:5", str(tmp_path / "rest")))
    shares = [Replica(rank, count) for rank in range(count)]
    assert sum(host_share(config, one) for one in shares) <= GIB
    specs = [directories(config, one) for one in shares]
    assert len({spec.path for both in specs for spec in both}) == 2 * count
    assert GIB > sum(both[0].size_bytes or 0 for both in specs) / 5 > 0.9 * 10**9
    assert all(both[1] == DirectorySpec(both[1].path, None, count) for both in specs)
    assert (tmp_path / "ssd").is_dir() and (tmp_path / "rest").is_dir()
