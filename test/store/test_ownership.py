"""Whose folders may hold a cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_hc.store import ownership
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.ownership import distrusted
from support.disk_store import open_store

OTHER = 12345


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o770, 0o2770])
def test_own_folders_are_trusted_and_so_is_their_group(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert distrusted(str(tmp_path)) is None


@pytest.mark.parametrize("mode", [0o702, 0o777, 0o1777])
def test_a_folder_that_everybody_can_write_to_is_not(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    assert distrusted(str(tmp_path)) == "everybody can write to it"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_or_a_link_of_another_user_is_not(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    assert distrusted(str(link)) is None
    os.lchown(link, OTHER, OTHER)
    assert distrusted(str(link)) == f"user {OTHER} owns it"
    os.chown(folder, OTHER, OTHER)
    assert distrusted(str(folder)) == f"user {OTHER} owns it"


def test_a_file_system_that_renames_users_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS files of root may belong to nobody: what we make there shows who we are. Root's
    folders are trusted by all."""
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert distrusted(str(tmp_path)) is None
    if os.getuid() == 0:
        os.chown(tmp_path, 999, 999)
        monkeypatch.setattr(ownership, "_owner_of_ours", lambda folder: 999)
        assert distrusted(str(tmp_path)) is None


def test_a_disk_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    folder = tmp_path / "sglang-hc"
    folder.chmod(0o777)
    with pytest.raises(DirectoryError, match=r"--hc-disk .* is not safe \(everybody .*; delete it"):
        open_store(tmp_path)
    folder.chmod(0o750)
    open_store(tmp_path).close()
    if os.geteuid() == 0:
        os.chown(folder, OTHER, OTHER)
        with pytest.raises(DirectoryError, match=rf"is not safe \(user {OTHER} owns it\)"):
            open_store(tmp_path)
