"""`sglang-hc inspect` and `sglang-hc fsck` on good, damaged, busy and foreign directories."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from sglang_hc.store.disk.backend import DirectBackend
from sglang_hc.store.disk.writer import Block
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.cli.main import main
from support.disk_store import FINGERPRINT, make_path, open_store, put, read_bytes

BUFFERED = DirectBackend(direct=False)


def fill(*folders: Path, count: int = 8) -> list[Block]:
    store = open_store(*folders, backend=BUFFERED)
    blocks = make_path(count) + make_path(3, seed=5, namespace="tenant-a")
    put(store, blocks)
    read_bytes(store, blocks[0].block_id)
    store.close()
    return blocks


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def fsck_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict]]:
    status, text = call(capsys, "fsck", "--json", *words)
    return status, json.loads(text)["directories"]


def slabs(folder: Path) -> list[Path]:
    return sorted((folder / "sglang-hc").glob("slab-*.dat"))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_folders_of_replicas_and_ranks_are_walked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory that was given to --hc-disk is enough, and its own store counts as well."""
    parts = [tmp_path / name for name in ("", "dp0/tp2-0", "dp0/tp2-1", "dp1/tp2-0", "pp2-1/tp4-3")]
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
        fill(part, count=4)
    (tmp_path / "other" / "sglang-hc").mkdir(parents=True)
    status, found = fsck_json(capsys, tmp_path)
    assert status == 0 and {report["path"] for report in found} == set(map(str, parts))
    assert all(report["blocks"] == 7 for report in found)
    flip(slabs(parts[2])[0], 4096 + 100)
    status, found = fsck_json(capsys, tmp_path, "--repair")
    assert [report["path"] for report in found if report["findings"]] == [str(parts[2])]
    status, text = call(capsys, "inspect", tmp_path, "--json")
    shown = json.loads(text)["directories"]
    assert [one["path"] for one in shown] == [report["path"] for report in found]
    assert sum(one["slots_used"] for one in shown) == 7 * 5 - 1


def test_inspect_counts_models_and_namespaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    status, text = call(capsys, "inspect", tmp_path, "--json")
    directory = json.loads(text)["directories"][0]
    assert status == 0 and directory["used_by"] is None and directory["slots_used"] == 11
    (model,) = directory["models"]
    assert model["fingerprint"] == FINGERPRINT.hex() and model["layers"] == 5
    counts = {one["namespace"]: (one["blocks"], one["hits"]) for one in model["namespaces"]}
    assert counts == {"": (8, 1), "tenant-a": (3, 0)}
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and "tenant-a" in text and "model tiny" in text and "not in use" in text


def test_inspect_beside_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path, backend=BUFFERED)
    put(store, make_path(2))
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and f"in use by process {os.getpid()}" in text and " 2 blocks" in text
    status, text = call(capsys, "fsck", tmp_path)
    assert status == 2 and "stop it first" in text
    status, text = call(capsys, "fsck", tmp_path, "--repair")
    assert status == 2 and "in use by process" in text
    assert read_bytes(store, make_path(1)[0].block_id)[0] is Outcome.OK
    store.close()


def test_inspect_of_a_copy_without_write_permission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where SQLite cannot make its shared memory file it reads a copy."""
    store = open_store(tmp_path / "live", backend=BUFFERED)
    put(store, make_path(2))
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    store.close()
    folder = tmp_path / "copy" / "sglang-hc"
    (folder / "index.sqlite-shm").unlink()
    (folder / "index.sqlite-shm").mkdir()
    status, text = call(capsys, "inspect", tmp_path / "copy")
    assert status == 0 and "2 blocks" in text


@pytest.mark.parametrize("command", ["inspect", "fsck"])
def test_a_directory_without_a_store_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, text = call(capsys, command, tmp_path)
    assert status == 2 and "no disk tier here" in text and "--hc-disk" in text


def test_fsck_of_a_good_store_finds_nothing_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path / "a", tmp_path / "b")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    status, reports = fsck_json(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 0
    for report in reports:
        assert report["blocks"] in (5, 6) and report["findings"] == []
        assert report["blocks"] + report["free_slots"] == report["slots"]
    assert before == {path: path.read_bytes() for path in before}
    status, text = call(capsys, "fsck", tmp_path / "a", tmp_path / "b")
    assert status == 0 and "nothing wrong" in text


def test_fsck_finds_and_drops_damaged_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = fill(tmp_path)
    flip(slabs(tmp_path)[2], 4096 + 9000)
    flip(slabs(tmp_path)[4], 4096 + 20)
    status, (report,) = fsck_json(capsys, tmp_path)
    assert status == 1 and report["blocks"] == 9
    assert [finding["kind"] for finding in report["findings"]] == ["block", "block"]
    status, text = call(capsys, "fsck", tmp_path)
    assert status == 1 and "NOT repaired" in text and "--repair" in text
    status, (report,) = fsck_json(capsys, tmp_path, "--repair")
    assert status == 0 and all(finding["repaired"] for finding in report["findings"])
    status, (report,) = fsck_json(capsys, tmp_path)
    assert status == 0 and report["blocks"] == 9
    assert report["blocks"] + report["free_slots"] == report["slots"], "no orphan slot"
    store = open_store(tmp_path, backend=BUFFERED)
    found = [store.contains([block.block_id]) for block in blocks]
    assert sum(found) == 9
    store.check_integrity()
    store.close()


def test_fsck_tidies_slab_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path)
    files = slabs(tmp_path)
    files[0].unlink()
    os.truncate(files[1], 4096)
    flip(files[2], 100)
    files[3].write_bytes(files[3].read_bytes() + b"x" * 4096)
    shutil.copy(files[4], files[4].with_name("slab-00000099.dat"))
    status, (report,) = fsck_json(capsys, tmp_path)
    kinds = [finding["kind"] for finding in report["findings"]]
    assert status == 1 and kinds.count("slab") == 5
    assert fsck_json(capsys, tmp_path, "--repair")[0] == 0
    status, (report,) = fsck_json(capsys, tmp_path)
    assert status == 0 and report["blocks"] == 7 and report["findings"] == []
    assert not files[4].with_name("slab-00000099.dat").exists()


@pytest.mark.parametrize("damage", ["missing", "malformed", "row", "marked"])
def test_fsck_rebuilds_a_damaged_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    blocks = fill(tmp_path)
    index = tmp_path / "sglang-hc" / "index.sqlite"
    if damage == "missing":
        index.unlink()
    elif damage == "malformed":
        content = bytearray(index.read_bytes())
        content[4096:] = os.urandom(len(content) - 4096)
        index.write_bytes(content)
    elif damage == "row":
        with sqlite3.connect(index) as connection:
            connection.execute("UPDATE blocks SET slot=77 WHERE block_id=?", (blocks[3].block_id,))
    else:
        (index.parent / "index.damaged").touch()
    assert call(capsys, "fsck", tmp_path)[0] == 1
    status, (report,) = fsck_json(capsys, tmp_path, "--repair")
    assert status == 0 and report["findings"]
    assert report["blocks"] == (10 if damage == "row" else 11)
    assert call(capsys, "fsck", tmp_path)[0] == 0


def test_fsck_of_one_directory_of_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory is complete by itself: damage in the other one is not its business."""
    fill(tmp_path / "a", tmp_path / "b")
    flip(slabs(tmp_path / "b")[0], 4096 + 9000)
    status, (first,) = fsck_json(capsys, tmp_path / "a")
    assert status == 0 and first["blocks"] == 6
    status, (first, second) = fsck_json(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1 and first["findings"] == []
    assert [finding["kind"] for finding in second["findings"]] == ["block"]
    assert fsck_json(capsys, tmp_path / "a", tmp_path / "b", "--repair")[0] == 0
    status, (first, second) = fsck_json(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 0 and (first["blocks"], second["blocks"]) == (6, 4)


def test_fsck_refuses_an_unknown_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    with sqlite3.connect(tmp_path / "sglang-hc" / "index.sqlite") as connection:
        connection.execute("PRAGMA user_version=9")
        connection.execute("UPDATE meta SET value='9'")
    before = {path: path.read_bytes() for path in slabs(tmp_path)}
    for words in (["fsck", tmp_path], ["fsck", tmp_path, "--repair"], ["inspect", tmp_path]):
        status, text = call(capsys, *words)
        assert status == 2 and "disk format 9" in text
    assert before == {path: path.read_bytes() for path in slabs(tmp_path)}


def test_a_directory_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another user: `inspect` ended with a traceback."""

    def deny(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", deny)
    for command in ("inspect", "fsck"):
        status, text = call(capsys, command, tmp_path)
        assert status == 2 and "cannot" in text and f"Permission denied: '{tmp_path}'" in text


def test_the_repair_that_fsck_proposes_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    fill(folder)
    flip(slabs(folder)[0], 10_000)
    assert f"sglang-hc fsck '{folder}' --repair" in call(capsys, "fsck", folder)[1]
