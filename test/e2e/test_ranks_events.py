"""KV events of a model on several ranks: the first rank tells what all of them hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.kv_events import Ports, Subscriber, settled
from support.prompts import on_disk, prompt
from support.ranked_core import run_ranks
from support.ranked_turns import engine

pytestmark = pytest.mark.slow


def mirrored(rank: int, port: int, kind: str, ports: Ports, folder: str) -> dict[str, int]:
    """How many events of each kind a mirror read that agreed at every quiet point."""
    flags = *on_disk(folder), "--page-size", "16", *ports.flags
    core = engine(rank, port, kind, "kv", "llama-gqa", *flags)
    reader = Subscriber(ports) if rank == 0 else None
    assert (core.tree.events is None) == (rank > 0)

    def quiet() -> None:
        core.settle()
        core.run()
        if reader is not None:
            settled(core, reader, poll=False)

    for seed in range(6):
        core.ask(prompt(seed, 300), 20)
        quiet()
    core.evict()
    quiet()
    core.ask(prompt(0, 320), 4)
    core.tree.tiers.host.evict(3, 0.0)  # on both ranks
    quiet()
    if reader is None:
        return {}
    assert reader.held["DISK"] and not reader.lost_from_device
    return dict(reader.events)


@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_a_mirror_agrees(models: None, tmp_path: Path, kind: str) -> None:
    first, second = run_ranks(mirrored, kind, Ports(), str(tmp_path / "d"), ranks=2)
    assert first["BlockStored"] and first["BlockRemoved"] and not second
