"""`sglang-hc inspect` and `sglang-hc fsck` on good, damaged, busy and foreign directories."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from sglang_hc.store.block import Block
from sglang_hc.store.disk.format import mac_key
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.cli.main import main
from support.disk_store import (
    BUFFERED,
    FILE,
    FINGERPRINT,
    block_files,
    check_ledgers,
    flip,
    is_served,
    make_path,
    open_store,
    put,
)

TENANT = make_path(3, seed=5, namespace="tenant-a")
BLOCKS = make_path(8) + TENANT


def fill(folder: Path) -> list[Block]:
    store = open_store(folder, backend=BUFFERED)
    assert put(store, BLOCKS) == [Outcome.OK] * 11
    store.close()
    return BLOCKS


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    status = main([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def fsck_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[dict]]:
    status, text = call(capsys, "fsck", "--json", *words)
    return status, json.loads(text)["directories"]


def file_of(folder: Path, block: Block) -> Path:
    (path,) = (folder / "sglang-hc").glob(f"*/?/?/{block.block_id.hex()}")
    return path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- inspect --------------------------------------------------------------------------------------


def test_inspect_counts_models_parts_and_namespaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(tmp_path)
    other = open_store(tmp_path, part=b"p" * 16)
    put(other, BLOCKS[:2])
    flip(file_of(tmp_path, BLOCKS[5]), 100)
    other.close()
    before = contents(tmp_path)
    status, text = call(capsys, "inspect", tmp_path, "--json")
    assert contents(tmp_path) == before
    (directory,) = json.loads(text)["directories"]
    assert status == 0 and directory["used_by"] == []
    whole, part = sorted(directory["models"], key=lambda model: model["part"])
    assert whole["fingerprint"] == part["fingerprint"] == FINGERPRINT.hex()
    assert (whole["part"], part["part"]) == ("", (b"p" * 16).hex())
    assert (whole["blocks"], whole["unreadable"], part["blocks"]) == (11, 1, 2)
    assert whole["file_bytes"] == FILE and whole["label"] == "tiny"
    counts = {one["namespace"]: one["blocks"] for one in whole["namespaces"]}
    assert counts == {"": 7, "tenant-a": 3}
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and "tenant-a" in text and "model tiny" in text and "not in use" in text
    assert "1 unreadable" in text and f"part {(b'p' * 16).hex()}" in text


def test_no_namespace_moves_the_cursor_of_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A client may have chosen it."""
    store = open_store(tmp_path)
    put(store, make_path(1, namespace="a\x1b[2Jb\r\nc"))
    store.close()
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and "a?[2Jb??c" in text and "\x1b" not in text


def test_inspect_beside_running_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = [open_store(tmp_path), open_store(tmp_path)]
    put(stores[0], make_path(2))
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and f"in use by process {os.getpid()}\n" in text
    assert " 2 blocks" in text
    for store in stores:
        store.tick()
        assert not store.directories[0].membership.alone, "whoever looks does not chase them away"
    for store in stores:
        store.close()
    assert "not in use" in call(capsys, "inspect", tmp_path)[1]


def test_inspect_of_a_copy_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path / "live")
    put(store, make_path(2))
    shutil.copytree(tmp_path / "live", tmp_path / "copy")
    store.close()
    for path in sorted((tmp_path / "copy").rglob("*")):
        path.chmod(0o400 if path.is_file() else 0o500)
    status, text = call(capsys, "inspect", tmp_path / "copy")
    assert status == 0 and "2 blocks" in text and "not in use" in text


@pytest.mark.parametrize("command", ["inspect", "fsck"])
def test_a_directory_without_a_store_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    status, text = call(capsys, command, tmp_path)
    assert status == 2 and "no disk tier here" in text and "--hc-disk" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["inspect", "fsck"])
def test_a_directory_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:  # fmt: skip
    """As of another user: `inspect` ended with a traceback."""
    fill(tmp_path)

    def deny(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", deny)
    status, text = call(capsys, command, tmp_path)
    assert status == 2 and "Permission denied" in text and str(tmp_path) in text


# -- fsck -----------------------------------------------------------------------------------------


def test_fsck_of_good_directories_finds_nothing_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        fill(folder)
    before = contents(tmp_path)
    for words in ([], ["--repair"]):
        status, reports = fsck_json(capsys, *folders, *words)
        assert status == 0
        for report, folder in zip(reports, folders, strict=True):
            assert report == {
                "path": str(folder), "blocks": 11, "keyed": 0, "bytes_verified": 11 * FILE,
                "findings": [],
            }  # fmt: skip
    assert contents(tmp_path) == before
    status, text = call(capsys, "fsck", *folders)
    assert status == 0 and text.count("nothing wrong") == 2


def test_fsck_finds_and_removes_what_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a server that has the directory open."""
    store = open_store(tmp_path, backend=BUFFERED)
    put(store, BLOCKS)
    foreign = open_store(tmp_path, fingerprint=bytes(16))
    (other,) = make_path(1, fingerprint=bytes(16))
    put(foreign, [other])
    files = [file_of(tmp_path, block) for block in BLOCKS]
    flip(files[0], 9000)  # a chunk
    flip(files[1], 20)  # the header
    os.truncate(files[2], FILE - 4096)
    files[3].write_bytes(files[3].read_bytes() + bytes(4096))
    shutil.copy(files[5], files[4])  # another block
    files[6].unlink()
    files[6].mkdir()
    wrong = Path(store.directories[0].path(other.block_id))
    wrong.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file_of(tmp_path, other), wrong)
    files[7].with_name(f"{'0' * 32}.tmp").touch()  # no block, nobody's business
    status, (report,) = fsck_json(capsys, tmp_path)
    assert status == 1 and report["blocks"] == 6
    found = {Path(finding["path"]): finding["detail"] for finding in report["findings"]}
    assert found.keys() == {*files[:5], files[6], wrong}
    assert "layer" in found[files[0]] and "digest" in found[files[1]]
    assert f"{FILE - 4096} bytes where {FILE} are a block" in found[files[2]]
    assert "another block than its name" in found[files[4]]
    assert "another model than its folder" in found[wrong]
    status, text = call(capsys, "fsck", tmp_path)
    assert status == 1 and text.count("NOT removed") == 7 and "--repair" in text
    assert all(path.exists() for path in found)
    status, (report,) = fsck_json(capsys, tmp_path, "--repair")
    assert status == 0 and all(finding["repaired"] for finding in report["findings"])
    assert not any(path.exists() for path in found)
    assert fsck_json(capsys, tmp_path)[1][0]["blocks"] == 6
    assert sum(is_served(store, block) for block in BLOCKS) == 5
    assert {*put(store, BLOCKS)} == {Outcome.OK, Outcome.DUPLICATE}
    assert all(is_served(store, block) for block in BLOCKS) and is_served(foreign, other)
    store.maintenance[store.directories[0]]._evictor.look(count=True)
    check_ledgers(store)
    store.close()
    foreign.close()


def test_fsck_beside_a_server_that_evicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What goes meanwhile is nothing that is wrong, and repairs take nothing that is in order."""
    store = open_store(tmp_path, size=30 * FILE, backend=BUFFERED)
    stop = threading.Event()

    def work() -> None:
        seed = 0
        while not stop.is_set():
            put(store, make_path(4, seed=seed % 40))
            seed += 1

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(12):
        status, (report,) = fsck_json(capsys, tmp_path, "--repair")
        assert status == 0 and not report["findings"]
    stop.set()
    worker.join()
    assert all(is_served(store, name) for name in store.block_ids())
    check_ledgers(store)
    store.close()


def test_the_repair_that_fsck_proposes_can_be_pasted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    fill(folder)
    flip(next(block_files(folder)), 10_000)
    assert f"sglang-hc fsck '{folder}' --repair" in call(capsys, "fsck", folder)[1]


def test_without_the_key_headers_alone_are_proven(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(tmp_path, backend=BUFFERED, key=mac_key(b"k" * 32))
    put(store, BLOCKS)
    store.close()
    flip(file_of(tmp_path, BLOCKS[0]), 5000)
    status, text = call(capsys, "fsck", tmp_path)
    assert status == 0 and "of 11 of them only the header" in text
    flip(file_of(tmp_path, BLOCKS[1]), 100)
    status, (report,) = fsck_json(capsys, tmp_path)
    assert status == 1 and report["keyed"] == report["blocks"] == 10
    status, text = call(capsys, "inspect", tmp_path)
    assert status == 0 and "tenant-a" in text
