"""Places that cannot be used, or no longer: one sentence at the start, lost cache later."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import time
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from sglang_hc.store.disk.index import Index
from sglang_hc.store.disk.index_file import IndexFull

from sglang_hc.store.disk import DirectorySpec, DiskStore, StoredModel, Upkeep
from sglang_hc.store.disk.directory import DirectoryError
from sglang_hc.store.outcome import Outcome
from support.clock import Clock
from support.disk_store import (
    FINGERPRINT,
    LAYOUT,
    SMALL,
    data_of,
    make_path,
    open_store,
    put,
    read_bytes,
    total_bytes,
)


def test_a_mistake_in_one_of_two_directories_is_refused(scratch: Path) -> None:
    """What the user can put right is said at the start, and not served around."""
    with pytest.raises(DirectoryError, match=r"no/such: cannot be used \(No such"):
        open_store(scratch / "a", scratch / "no" / "such")
    open_store(scratch / "a").close()


def test_a_directory_removed_under_the_store_loses_cache_not_requests(scratch: Path) -> None:
    folder = scratch / "disk"
    store = open_store(folder)
    blocks = make_path(4)
    put(store, blocks)
    shutil.rmtree(folder)
    for seed in range(3):
        for answer in put(store, make_path(4, seed=50 + seed)):
            assert answer is Outcome.IO_ERROR, "the log of an index that nobody sees has no bound"
    for block in blocks:
        status, got = read_bytes(store, block.block_id)
        assert status is not Outcome.OK or np.array_equal(got, data_of(block))
    store.tick()
    store.close()
    open_store(folder).close()


def test_a_missing_parent_is_one_clear_sentence(scratch: Path) -> None:
    with pytest.raises(DirectoryError, match=r"--hc-disk .*/no/such: cannot be used \(No such"):
        open_store(scratch / "no" / "such")


def test_a_file_in_place_of_the_directory_is_one_clear_sentence(scratch: Path) -> None:
    (scratch / "file").write_text("x")
    with pytest.raises(DirectoryError, match=r"cannot be used \((Not a directory|File exists)\)"):
        open_store(scratch / "file")


@pytest.mark.skipif(os.geteuid() == 0 and not shutil.which("setpriv"), reason="root reads all")
def test_a_read_only_directory_is_one_clear_sentence(scratch: Path) -> None:
    """Root may write anywhere, so the attempt runs in a child without privileges."""
    folder = scratch / "disk"
    folder.mkdir()
    folder.chmod(0o555)
    os.chmod(scratch, 0o755)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            open_store(folder)
        except DirectoryError as error:
            code = 0 if "Permission denied" in str(error) and "--hc-disk" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert total_bytes(folder) == 0


def test_a_pause_ends_in_time_though_the_system_clock_is_set_back(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (spec,) = [DirectorySpec(str(scratch), SMALL)]
    model = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "tiny")
    store = DiskStore.open([spec], model, Upkeep(background=False))
    (directory,) = store.directories
    while not directory.breaker.failed():
        assert directory.usable()
    assert not directory.usable()
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "time", lambda: 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert directory.usable()
    store.close()


def test_a_place_without_file_locks_is_one_clear_sentence(scratch: Path) -> None:
    held = len(os.listdir("/proc/self/fd"))
    refused = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with (
        mock.patch.object(fcntl, "flock", side_effect=refused),
        pytest.raises(DirectoryError, match=r"cannot be used \(No locks available\); name"),
    ):
        open_store(scratch)
    assert len(os.listdir("/proc/self/fd")) == held
    open_store(scratch).close()


def test_a_full_disk_at_the_start_is_one_clear_sentence(scratch: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(os, "pwrite", side_effect=full),
        pytest.raises(DirectoryError, match=r"\(No space left on device\); free some space"),
    ):
        open_store(scratch)
    open_store(scratch).close()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_reserves_no_space_is_used_without(scratch: Path, code: int) -> None:
    """What the C library says where neither the system nor single bytes written with O_DIRECT
    can reserve the space."""
    with mock.patch.object(os, "posix_fallocate", side_effect=OSError(code, os.strerror(code))):
        store = open_store(scratch)
        blocks = make_path(6)
        assert put(store, blocks) == [Outcome.OK] * 6
    (header, *_) = store.directories[0].index.slabs()
    slab = scratch / "sglang-hc" / f"slab-{header.slab:08d}.dat"
    assert slab.stat().st_size == header.file_bytes
    for block in blocks:
        status, got = read_bytes(store, block.block_id)
        assert status is Outcome.OK and np.array_equal(got, data_of(block))
    store.close()


def test_a_sound_index_stays_when_a_full_disk_keeps_it_from_being_opened(scratch: Path) -> None:
    """SQLite calls it a disk I/O error when there is no room for its shared memory. The index was
    deleted then, to be made again, for which there was no room either."""
    store = open_store(scratch)
    blocks = make_path(4)
    put(store, blocks)
    store.close()
    index = scratch / "sglang-hc" / "index.sqlite"
    before = index.read_bytes()
    error = sqlite3.OperationalError("disk I/O error")
    full = types.SimpleNamespace(f_bavail=31, f_frsize=4096)
    with (
        mock.patch.object(Index, "_prepare", side_effect=error),
        mock.patch.object(os, "statvfs", return_value=full),
        pytest.raises(DirectoryError, match=r"disk I/O error, and the disk is full\); free some"),
    ):
        open_store(scratch)
    assert index.read_bytes() == before
    full.f_bavail = 32
    with mock.patch.object(os, "statvfs", return_value=full):
        index.write_bytes(b"")
        store = open_store(scratch)  # a damaged one is made again
    assert store.contains([block.block_id for block in blocks]) == 4
    store.close()


def test_an_index_that_takes_nothing_is_said_once_a_minute(
    scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = open_store(scratch, clock=clock)
    with mock.patch.object(Index, "insert", side_effect=IndexFull("database or disk is full")):
        for seed in range(3):
            assert put(store, make_path(1, seed=seed)) == [Outcome.NO_SPACE]
        assert caplog.text.count("takes no changes now: database or disk is full") == 1
        clock.pass_time(60)
        put(store, make_path(1))
    assert caplog.text.count("takes no changes now") == 2
    assert store.counters()["index_refused"] == 4
    store.close()
