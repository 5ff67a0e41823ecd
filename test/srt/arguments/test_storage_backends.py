"""SGLang's storage back ends as remote stores: both interfaces, the factory, the messages."""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_hc.config import REMOTES, ConfigError, HcConfig
from sglang_hc.srt.arguments.storage_backends import (
    PACKAGES,
    FramePool,
    PageBackend,
    ValueBackend,
    check_remote,
    open_remote,
    remote_key,
    remote_store,
)
from sglang_hc.store.disk.format import StoredModel, seal_block
from sglang_hc.store.known_blocks import KnownBlocks
from sglang_hc.store.outcome import Outcome
from sglang_hc.store.remote import Frames, RemoteBackend
from support.disk_store import names_of
from support.prompts import store_options as options_for
from support.remote import (
    FINGERPRINT,
    LAYOUT,
    MODEL,
    blocks_over,
    check_round_trip,
    find,
    frames_of,
    load,
    make_path,
    make_pool,
    save,
)

VALUES: dict[str, bytes] = {}
"""What the stores below hold, as if it were somewhere else."""


class Pages(HiCacheStorage):
    """A store of pages by address, as Mooncake's: one object per page of an MLA pool."""

    def __init__(self, config: Any, options: Any) -> None:
        assert config.is_mla_model and config.extra_config["module_path"] == __name__

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        pages = zip(*self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True)
        for key, (address, size) in zip(keys, pages, strict=True):
            VALUES.setdefault(key, ctypes.string_at(address, size))
        return [True] * len(keys)

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        pages = zip(*self.mem_pool_host.get_page_buffer_meta(host_indices), strict=True)
        for key, (address, size) in zip(keys, pages, strict=True):
            if key in VALUES:
                ctypes.memmove(address, VALUES[key], size)
        return [key in VALUES for key in keys]

    def exists(self, key: str) -> bool:
        return key in VALUES

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    get = set = batch_get = batch_set = _unused


class Values(HiCacheStorage):
    """A store of tensors that hands out tensors of its own."""

    def __init__(self, config: Any, options: Any) -> None:
        return None

    def set(self, key: str, value: Any = None, *_: Any) -> bool:
        VALUES.setdefault(key, value.numpy().tobytes())
        return True

    def get(self, key: str, target_location: Any = None, *_: Any) -> Any:

        return (
            torch.frombuffer(bytearray(VALUES[key]), dtype=torch.uint8) if key in VALUES else None
        )

    def exists(self, key: str) -> bool:
        return key in VALUES

    def batch_get(self, *_: Any) -> Any:
        raise NotImplementedError

    batch_set = batch_get


@pytest.fixture(autouse=True)
def empty() -> None:
    VALUES.clear()


def open_dynamic(name: str, frames: Frames) -> RemoteBackend:
    options = {"backend_name": name, "module_path": __name__, "class_name": name}
    return open_remote("dynamic", options, frames)


@pytest.mark.parametrize(("name", "adapter"), [("Pages", PageBackend), ("Values", ValueBackend)])
def test_a_class_of_the_users_through_either_interface(name: str, adapter: type) -> None:
    frames = frames_of()
    backend = open_dynamic(name, frames)
    assert type(backend) is adapter and backend.name == name
    check_round_trip(backend, frames)


def test_sglangs_file_store_as_a_class_of_the_users(tmp_path: Path) -> None:
    """A value of another length than was stored is a miss, too."""
    frames, pool = frames_of(), make_pool()
    backend = open_remote("dynamic", options_for(str(tmp_path)), frames)
    check_round_trip(backend, frames)
    files = list(tmp_path.iterdir())
    assert len(files) == 5
    assert all(file.name.startswith(f"hc3-{FINGERPRINT.hex()}") for file in files)
    io = blocks_over(backend, frames, pool)
    files[0].write_bytes(files[0].read_bytes()[:-1])
    outcomes = [load(io, name) for name in names_of(make_path(5))]
    assert sum(outcome is Outcome.OK for outcome in outcomes) == 4
    io.close()


def test_frames_answer_like_a_host_pool() -> None:
    frames = frames_of()
    pool = FramePool(frames)
    page = pool.get_dummy_flat_data_page()
    page.fill_(3)
    pool.set_from_flat_data_page(1, page)
    assert (frames.bytes[1] == 3).all() and not frames.bytes[0].any()
    assert pool.get_data_page(1).equal(page)
    assert pool.get_size_per_token() == pool.get_ksize_per_token() == frames.bytes.shape[1]
    assert pool.get_page_buffer_element_size() == frames.bytes.shape[1]
    assert pool.is_stride_page_aligned(4096)


def test_the_kinds_are_sglangs() -> None:
    """But for `file`, which is a directory of our own."""
    assert set(REMOTES) - {"dynamic"} <= set(StorageBackendFactory._registry)


def test_a_missing_package_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PACKAGES, "nixl", ("not_there", "nixl"))
    with pytest.raises(ConfigError, match=r"--hc-remote nixl needs the package nixl; install it"):
        check_remote(HcConfig(remote="nixl"))


def test_a_package_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(HiCacheStorage):
        def __new__(cls, *_: Any) -> Any:
            try:
                raise ImportError("libibverbs.so.1: cannot open shared object file")
            except ImportError as error:
                raise ImportError("Please install mooncake") from error

    monkeypatch.setattr(sys.modules[__name__], "Values", Broken)
    with pytest.raises(ConfigError, match=r"does not load: libibverbs.so.1: cannot open"):
        open_dynamic("Values", frames_of())


def test_options_that_do_not_fit_are_reported() -> None:
    with pytest.raises(ConfigError, match=r"--hc-remote dynamic does not start: .*module_path.*"):
        open_remote("dynamic", {"backend_name": "x"}, frames_of())


@pytest.mark.parametrize("options", ["{}", '{"dir": 3}', '{"dir": ""}', '{"dir": "/a:0"}'])
def test_file_needs_a_directory(options: str) -> None:
    with pytest.raises(ConfigError, match=r"^--hc-remote file"):
        check_remote(HcConfig(remote="file", remote_config=options))


def test_file_takes_no_options_of_sglangs() -> None:
    """Who limited its size otherwise would have no limit."""
    check_remote(HcConfig(remote="file", remote_config='{"dir": "/mnt/shared:200"}'))
    options = '{"dir": "/mnt/shared", "max_size": "200G"}'
    with pytest.raises(ConfigError, match=r"takes nothing else: .*DIR\[:SIZE_GB\]"):
        check_remote(HcConfig(remote="file", remote_config=options))


def in_nixl(folder: Path) -> HcConfig:
    return HcConfig(remote="nixl", remote_config=json.dumps({"dir": str(folder)}))


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were here."""
    monkeypatch.setitem(PACKAGES, "nixl", ("json", "nixl"))


def test_a_folder_that_is_not_safe_or_cannot_be_made_is_refused(nixl: None, tmp_path: Path) -> None:
    """Which are safe is in test_ownership.py."""
    check_remote(in_nixl(tmp_path))
    (tmp_path / "sglang-hc").chmod(0o702)
    with pytest.raises(ConfigError, match=r"--hc-remote nixl .* not safe .*everybody"):
        check_remote(in_nixl(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be used .*; give a directory"):
        check_remote(in_nixl(tmp_path / "file"))


def test_only_servers_with_the_same_key_read_each_others_blocks(tmp_path: Path) -> None:
    """By a name that follows from the key; what is put there without it is forged."""
    pool, path = make_pool(), make_path(2)
    names = names_of(path)
    servers, models = {}, {}
    for who, secret in (("one", b"a" * 16), ("two", b"a" * 16), ("other", b"b" * 16), ("no", None)):
        key = None
        if secret is not None:
            (tmp_path / who).write_bytes(secret)
            (tmp_path / who).chmod(0o600)
            key = str(tmp_path / who)
        options = json.dumps(options_for(str(tmp_path / "files")))
        config = HcConfig(remote="dynamic", remote_config=options, remote_key=key)
        models[who] = StoredModel.of(LAYOUT.chunks(), FINGERPRINT, "", key=remote_key(config))
        servers[who] = KnownBlocks(remote_store(config, pool, models[who], Counter()))
    assert save(servers["one"], pool, path) == [Outcome.OK] * 2
    found = {who: find(io, names) for who, io in servers.items()}
    assert found == {"one": 2, "two": 2, "other": 0, "no": 0}
    files = list((tmp_path / "files").glob("hc3-*"))
    assert len(files) == 2
    two = servers["two"]
    assert load(two, names[0]) is Outcome.OK
    (victim,) = [file for file in files if names[1].hex() in file.name]
    frame = np.frombuffer(victim.read_bytes(), dtype=np.uint8).copy()
    page, data = frame[: MODEL.header_bytes], frame[MODEL.header_bytes :]
    data ^= 1
    forger = replace(models["two"], key=None)  # who may write to the store can read names there
    seal_block(page.data, data.data, path[1], forger, 0)
    victim.write_bytes(frame.tobytes())
    assert load(two, names[1]) is Outcome.DAMAGED
    assert two.counts["remote_forged"] == 1
    for io in servers.values():
        io.close()
