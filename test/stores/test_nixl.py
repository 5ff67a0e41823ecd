"""NIXL's POSIX plugin as the remote store."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_hc.srt.arguments.storage_backends import open_remote
from sglang_hc.store.remote import CALLS, Frames
from support.core import run_in_child
from support.remote import MODEL, check_round_trip
from support.two_servers import STORED, both_turns, first_turn, second_turn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="the package nixl is not on the path; `make stores` puts it there",
    ),
]


def options(folder: Path) -> dict[str, Any]:
    """Files stay, however full the disk is that the tests run on."""
    posix = {"posix": {"active": True}}
    return {"dir": str(folder), "plugin": posix, "l3_cleaner_enabled": False}


def files(folder: Path) -> list[Path]:
    return [path for path in (folder / "sglang-hc").rglob("hc3-*") if path.is_file()]


def test_blocks_come_back_by_several_calls_at_a_time(tmp_path: Path) -> None:
    run_in_child(several_calls, tmp_path)


def several_calls(folder: Path) -> None:
    for seed in range(5):
        frames = Frames(MODEL.header_bytes, MODEL.block_bytes, CALLS)
        backend = open_remote("nixl", options(folder), frames)
        assert backend.name == "HiCacheNixl"
        check_round_trip(backend, frames, seed)
    assert len(files(folder)) == 25


def other_version(value: bytes) -> bytes:
    return value[:8] + bytes([value[8] + 1]) + value[9:]


@pytest.mark.parametrize(
    ("change", "counted"),
    [
        (None, ""),
        (lambda value: None, "remote_lookups"),
        (other_version, "remote_unknown_version"),
        (lambda value: value[:-1] + bytes([value[-1] ^ 1]), "remote_read_damaged"),
        (lambda value: value[: len(value) // 2], "remote_read_"),
    ],
    ids=["well", "lost", "version", "damaged", "shorter"],
)
def test_one_server_goes_on_with_what_another_computed(
    models: None, tmp_path: Path, change: Callable[[bytes], bytes | None] | None, counted: str
) -> None:
    """What is not the block any more is computed again."""
    first, wanted = run_in_child(both_turns)
    flags = ("--hc-remote", "nixl", "--hc-remote-config", json.dumps(options(tmp_path)))
    tokens, stats = run_in_child(first_turn, "kv", *flags)
    assert tokens == first and stats["remote_saved_blocks"] == 4 == len(files(tmp_path))
    for path in files(tmp_path) if change is not None else ():
        value = change(path.read_bytes())
        path.unlink()
        if value is not None:
            path.write_bytes(value)
    reply, stats = run_in_child(second_turn, "kv", first, *flags)
    assert reply.tokens == wanted
    assert reply.storage == (STORED if change is None else 0)
    assert any(name.startswith(counted) and stats[name] for name in stats), stats
