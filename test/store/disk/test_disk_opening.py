"""Directories that cannot be used, or no longer: one sentence at the start, lost cache later."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import pytest

from sglang_hc.store.disk import DirectoryError, DirectorySpec
from sglang_hc.store.disk.backend import probe_direct
from sglang_hc.store.disk.directory import steady_time
from sglang_hc.store.outcome import Outcome
from sglang_hc.tools.cli.main import main
from support.disk_store import (
    FILE,
    Faults,
    FaultyBackend,
    check_ledgers,
    failing,
    is_served,
    make_path,
    only_in,
    open_store,
    put,
)


@pytest.mark.parametrize(
    ("text", "path", "size"),
    [
        ("/mnt/ssd", "/mnt/ssd", None),
        ("/mnt/ssd:200", "/mnt/ssd", 200 * 10**9),
        ("/mnt/ssd:0.5", "/mnt/ssd", 5 * 10**8),
        ("/a:b", "/a:b", None),
        ("/a:b:3", "/a:b", 3 * 10**9),
        ("/a:.b", "/a:.b", None),
        ("/a:20/b", "/a:20/b", None),
    ],
)
def test_directory_specs(text: str, path: str, size: int | None) -> None:
    assert DirectorySpec.parse(text) == DirectorySpec(path, size)


@pytest.mark.parametrize(
    "text", ["", "/mnt:", "/mnt:-1", "/mnt:0", "/mnt:1.2.3", "/mnt:200GB", "/mnt:1e3"]
)
def test_bad_directory_specs_name_the_option(text: str) -> None:
    with pytest.raises(DirectoryError, match="--hc-disk"):
        DirectorySpec.parse(text)


@pytest.mark.parametrize("users", [1, 3])
def test_a_budget_has_room_for_some_blocks_of_each_rank(scratch: Path, users: int) -> None:
    with pytest.raises(DirectoryError, match="too small for this model; give at least") as error:
        open_store(scratch, size=4 * users * FILE - 1, users=users)
    open_store(scratch, size=4 * users * FILE, users=users).close()
    said = int(1e9 * float(str(error.value).split()[-2]))
    open_store(scratch, size=said, users=users).close()
    assert not list((scratch / "sglang-hc" / "servers").iterdir())


def test_without_a_size_a_share_of_what_is_free_and_stored_is_the_budget(scratch: Path) -> None:
    faults = Faults(free=100 * FILE)
    store = open_store(scratch, size=None, backend=FaultyBackend(faults))
    assert store.capacity == 80
    put(store, make_path(20))
    store.close()
    faults.free = 80 * FILE
    store = open_store(scratch, size=None, backend=FaultyBackend(faults))
    assert store.capacity == 80, "the same after a restart"


# -- other formats --------------------------------------------------------------------------------


def files_in(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "text", "found", "remedy"),
    [
        ("index.sqlite", "SQLite", "2", "delete .*sglang-hc, which is only a cache, or name"),
        ("format", "2\n", "2", "delete .*sglang-hc, which is only a cache, or name"),
        ("format", "4\n", "4", "upgrade sglang-hc or name"),
        ("format", "of the future", "of the future", "upgrade sglang-hc or name"),
    ],
)
def test_another_format_is_refused_and_left_as_it_is(
    scratch: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, found: str, remedy: str
) -> None:
    root = scratch / "sglang-hc"
    root.mkdir()
    (root / name).write_text(text)
    (root / "slab-00000001.dat").write_bytes(b"x" * 4096)
    before = files_in(scratch)
    said = rf"written in disk format {found}, this sglang-hc knows format 3; {remedy} another dir"
    with pytest.raises(DirectoryError, match=rf"--hc-disk .*: {said}.*nothing was changed"):
        open_store(scratch)
    for command in (["inspect"], ["fsck"], ["fsck", "--repair"]):
        assert main([*command, str(scratch)]) == 2
        assert f"written in disk format {found}" in capsys.readouterr().err
    assert files_in(scratch) == before
    shutil.rmtree(root)  # what the message says helps
    open_store(scratch).close()


# -- places ---------------------------------------------------------------------------------------


def test_a_missing_parent_or_a_file_in_its_place_is_one_clear_sentence(scratch: Path) -> None:
    """What the user can put right is said at the start, and not served around."""
    for others in ([], [scratch / "a"]):
        with pytest.raises(DirectoryError, match=r"--hc-disk .*/no/such: cannot be used \(No such"):
            open_store(*others, scratch / "no" / "such")
    (scratch / "file").write_text("x")
    with pytest.raises(DirectoryError, match=r"cannot be used \((Not a directory|File exists)\)"):
        open_store(scratch / "file")
    open_store(scratch / "a")


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
    assert not list(folder.iterdir())


def test_a_place_without_file_locks_is_one_clear_sentence(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = len(os.listdir("/proc/self/fd"))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(DirectoryError, match=r"cannot be used \(No locks available\); name"):
            open_store(scratch)
    assert len(os.listdir("/proc/self/fd")) == held
    open_store(scratch).close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_one_of_two_devices_that_fails_at_the_start(
    scratch: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts with the other one; it does not start with none."""
    folders = [scratch / "a", scratch / "b"]
    store = open_store(*folders)
    blocks = make_path(12)
    put(store, blocks)
    kept = {d.root.split("/")[-2]: list(d.blocks) for d in store.directories}
    store.close()
    held = len(os.listdir("/proc/self/fd"))
    for bad, good in ("ab", "ba"):
        store = open_store(
            *folders, backend=FaultyBackend(Faults(on_free=only_in(f"/{bad}/", failing(code))))
        )
        assert f"--hc-disk {scratch / bad}: cannot be used" in caplog.text
        assert sorted(store.block_ids()) == sorted(kept[good])
        assert all(is_served(store, name) for name in kept[good])
        assert not store.erase(None).complete, "the other one may hold more"
        put(store, blocks)
        store.close()
    with pytest.raises(DirectoryError, match=r"--hc-disk .*: cannot be used"):
        open_store(*folders, backend=FaultyBackend(Faults(on_free=failing(code))))
    assert len(os.listdir("/proc/self/fd")) == held, "nothing is locked"


def test_a_disk_that_is_full_of_blocks_is_used_again(scratch: Path, faults: Faults) -> None:
    """The start needs no room: all its small files are there."""
    store = open_store(scratch, backend=FaultyBackend(faults))
    put(store, make_path(30))
    store.close()
    before = {path: path.stat().st_mtime_ns for path in (scratch / "sglang-hc").glob("format*")}
    faults.free = 0
    store = open_store(scratch, backend=FaultyBackend(faults))
    after = {path: path.stat().st_mtime_ns for path in (scratch / "sglang-hc").glob("format*")}
    assert before == after
    assert put(store, make_path(3, seed=1)) == [Outcome.OK] * 3
    assert store.counters()["evicted_blocks"] > 0


@pytest.mark.parametrize(
    ("code", "direct"),
    [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EINVAL, False), (errno.EIO, None)],
)
def test_a_disk_without_room_is_no_reason_to_do_without_direct_io(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, code: int, direct: bool | None
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", refuse)
    if direct is None:
        with pytest.raises(OSError, match="Input/output"):
            probe_direct(str(scratch / "probe"))
    else:
        assert probe_direct(str(scratch / "probe")) is direct
    assert not list(scratch.iterdir())


def test_a_pause_ends_in_time_though_the_system_clock_is_set_back(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(scratch, clock=steady_time)
    (directory,) = store.directories
    while not directory.breaker.failed():
        assert directory.usable()
    assert not directory.usable()
    with monkeypatch.context() as patch:
        later = steady_time() + 6
        patch.setattr("time.time", lambda: 0.0)
        assert not directory.usable()
        directory.breaker._clock = lambda: later
        assert directory.usable()


# -- several at once, and by hand -----------------------------------------------------------------


def test_many_open_a_directory_at_once(scratch: Path) -> None:
    stores, errors = [], []

    def begin() -> None:
        try:
            stores.append(open_store(scratch / "new"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=begin) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(stores) == 12
    assert len({one.directories[0].membership.name for one in stores}) == 12
    for number, one in enumerate(stores):
        assert put(one, make_path(2, seed=number)) == [Outcome.OK] * 2
    check_ledgers(stores[0])
    for one in stores:
        one.close()
    names = {path.name for path in (scratch / "new" / "sglang-hc").iterdir()}
    assert {"format", "lock", "new", "servers"} < names and len(names) == 5


def test_a_directory_named_twice_is_two_servers(scratch: Path) -> None:
    store = open_store(scratch, scratch)
    store.tick()
    assert put(store, make_path(4)) == [Outcome.OK] * 4
    check_ledgers(store)


@pytest.mark.parametrize("what", ["", "sglang-hc"])
def test_a_directory_removed_under_the_store_loses_cache_not_requests(
    scratch: Path, what: str
) -> None:
    folder = scratch / "disk"
    store = open_store(folder)
    blocks = make_path(4)
    put(store, blocks)
    shutil.rmtree(folder / what)
    for seed in range(3):
        assert set(put(store, make_path(4, seed=50 + seed))) == {Outcome.IO_ERROR}
    assert not any(is_served(store, block) for block in blocks)
    store.tick()
    assert not store.erase(None).complete
    store.close()
    assert not (folder / "sglang-hc").exists(), "it may have been unmounted"
    open_store(folder).close()


@pytest.mark.parametrize("gone", ["lock", "servers", "new", "format", "*"])
def test_what_is_removed_by_hand_is_made_again(scratch: Path, gone: str) -> None:
    """Else two servers would each have a ledger of its own, or one take the other for dead."""
    stores = [open_store(scratch, size=20 * FILE), open_store(scratch, size=20 * FILE)]
    put(stores[0], make_path(6))
    for path in (scratch / "sglang-hc").glob(gone):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for store in stores:
        store.directories[0].membership.look()
    third = open_store(scratch, size=20 * FILE)
    for store in (*stores, third):
        store.directories[0].membership.look()
        assert not store.directories[0].membership.alone
    for seed in range(1, 9):
        for store in (*stores, third):
            put(store, make_path(2, seed=seed))
            store.directories[0].find_others()
            check_ledgers(store)
            assert len(list((scratch / "sglang-hc" / "servers").iterdir())) == 3
