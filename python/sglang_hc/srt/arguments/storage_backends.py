"""SGLang's storage back ends (`HiCacheStorage`) as this package's remote store.

SGLang hands its back ends pages of its own host pool. Here they get frames instead: each is a page
of one "token" with a block's envelope in it, in a pool that says it belongs to an MLA model, whose
pages are one object each and the same on every rank. A back end registers the frames as it would
register SGLang's pool.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_hc.config import HcConfig, read_remote_config, shared_directory
from sglang_hc.errors import ConfigError
from sglang_hc.store.disk import DirectoryError
from sglang_hc.store.disk.format import StoredModel, mac_key
from sglang_hc.store.disk.opening import make_root
from sglang_hc.store.host_pool import SlotPool
from sglang_hc.store.ownership import read_remote_key
from sglang_hc.store.remote import CALLS, Frames, RemoteBackend, RemoteStore

logger = logging.getLogger(__name__)

PACKAGES = {
    "mooncake": ("mooncake", "mooncake-transfer-engine"),
    "nixl": ("nixl", "nixl"),
}
"""What a kind needs beside SGLang: the module, and the package it is in. Any thread may call their
clients; a class of the users' gets one call at a time."""

NIXL_DIRECTORY = envs.SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR
"""Where NIXL looks for its directory on a file system, our option `dir`."""


class FramePool:
    """What SGLang's back ends ask of a host pool, answered with frames.

    kv_buffer: shape (frames, envelope bytes) uint8, one page per row.
    """

    layout = "page_first"
    page_size = 1
    dtype = torch.uint8
    device = "cpu"
    pin_memory = False
    can_use_write_back_jit = False
    stores_page_envelope = False

    def __init__(self, frames: Frames) -> None:
        self.kv_buffer = torch.from_numpy(frames.bytes)
        self.size, self._page_bytes = self.kv_buffer.shape

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """(addresses, sizes) of pages, in bytes."""
        base = self.kv_buffer.data_ptr()
        pages = [base + index * self._page_bytes for index in indices.tolist()]
        return pages, [self._page_bytes] * len(pages)

    def get_data_page(self, index: int | torch.Tensor, flat: bool = True) -> torch.Tensor:
        """One page, shape (envelope bytes,)."""
        return self.kv_buffer[int(index)]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Memory of a page's size for a back end to read into."""
        return torch.empty(self._page_bytes, dtype=self.dtype)

    def set_from_flat_data_page(self, index: int | torch.Tensor, page: torch.Tensor) -> None:
        self.kv_buffer[int(index)].copy_(page.view(-1))

    def get_size_per_token(self) -> int:
        return int(self._page_bytes)

    get_ksize_per_token = get_size_per_token

    def get_page_buffer_element_size(self, split_factor: int = 1) -> int:
        return int(self._page_bytes)

    def is_stride_page_aligned(self, alignment: int) -> bool:
        aligned: bool = (self.kv_buffer.data_ptr() | self._page_bytes) % alignment == 0
        return aligned


class PageBackend:
    """A back end that moves pages of a registered pool (SGLang's interface v1)."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage
        self.name = type(storage).__name__

    def exists(self, keys: Sequence[str]) -> int:
        return int(self._storage.batch_exists(list(keys)))

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        return list(self._storage.batch_get_v1(list(keys), torch.tensor(list(frames))))

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        return list(self._storage.batch_set_v1(list(keys), torch.tensor(list(frames))))

    def delete(self, keys: Sequence[str]) -> bool:
        delete = getattr(self._storage, "delete", None)
        if delete is None:
            return False
        for key in keys:
            delete(key)
        return True

    def clear(self) -> None:
        able = type(self._storage).clear is not HiCacheStorage.clear  # which does nothing
        if not able or self._storage.clear() is False:
            raise OSError(f"{self.name} did not clear itself")

    def close(self) -> None:
        close = getattr(self._storage, "close", None)
        if close is not None:
            close()


class ValueBackend(PageBackend):
    """A back end that takes and gives tensors."""

    def __init__(self, storage: HiCacheStorage, pool: FramePool) -> None:
        super().__init__(storage)
        self._pool = pool

    def get(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        return [
            self._get(key, self._pool.kv_buffer[f]) for key, f in zip(keys, frames, strict=True)
        ]

    def put(self, keys: Sequence[str], frames: Sequence[int]) -> Sequence[bool]:
        pages = [self._pool.kv_buffer[frame] for frame in frames]
        return [bool(self._storage.set(k, page)) for k, page in zip(keys, pages, strict=True)]

    def _get(self, key: str, page: torch.Tensor) -> bool:
        value = self._storage.get(key, page)
        if value is not None and value.data_ptr() != page.data_ptr():
            page.copy_(value.view(-1))
        return value is not None


def remote_store(
    config: HcConfig, pool: SlotPool, model: StoredModel, counts: Counter[str]
) -> RemoteStore:
    """The remote store of the options. model: whose the blocks are. Raises ConfigError."""
    assert config.remote is not None
    calls = CALLS if config.remote in PACKAGES else 1
    frames = Frames(model.header_bytes, model.block_bytes, calls)
    backend = open_remote(config.remote, read_remote_config(config.remote_config), frames)
    logger.info("sglang-hc: remote store %s (%s)", config.remote, backend.name)
    return RemoteStore(backend, frames, pool, model, counts)


def remote_key(config: HcConfig) -> bytes | None:
    """Of the blocks' MACs; None without `--hc-remote-key`. Raises ConfigError."""
    return None if config.remote_key is None else mac_key(read_remote_key(config.remote_key))


def check_remote(config: HcConfig) -> None:
    """Raise ConfigError for what can be known to be missing before any process starts."""
    kind = config.remote
    if kind is None:
        return
    module, package = PACKAGES.get(kind, (None, None))
    if module is not None and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"--hc-remote {kind} needs the package {package}; install it into the server's "
            "environment"
        )
    shared_directory(config)
    if kind == "nixl":
        _nixl_directory(read_remote_config(config.remote_config).get("dir"))


def open_remote(kind: str, options: dict[str, Any], frames: Frames) -> RemoteBackend:
    """The back end of this kind (`--hc-remote`) with its options (`--hc-remote-config`).

    Raises ConfigError with a message for users.
    """
    options = dict(options)
    if kind == "nixl":
        folder = _nixl_directory(options.pop("dir", None))
        if folder is not None:
            NIXL_DIRECTORY.set(folder)
    pool = FramePool(frames)
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=True,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name=None,  # the keys name model and plan already
        extra_config=options,
    )
    try:
        storage = StorageBackendFactory.create_backend(kind, config, pool)
        storage.register_mem_pool_host(pool)
    except ImportError as error:  # SGLang names the package; why it does not load is the cause
        raise ConfigError(
            f"--hc-remote {kind}: its package does not load: {error.__cause__ or error}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"--hc-remote {kind} does not start: {type(error).__name__}: {error}. Check "
            "--hc-remote-config and that the store is up, or leave out --hc-remote"
        ) from error
    if type(storage).batch_get_v1 is HiCacheStorage.batch_get_v1:
        return ValueBackend(storage, pool)
    return PageBackend(storage)


def _nixl_directory(directory: object) -> str | None:
    """The folder of NIXL's back ends on a file system, made if it is missing. None: it needs none,
    as its plugins for object stores."""
    directory = directory or NIXL_DIRECTORY.get()
    if directory is None:
        return None
    path = os.path.realpath(os.path.expanduser(str(directory)))
    try:
        return make_root(path)
    except DirectoryError as error:
        raise ConfigError(str(error).replace("--hc-disk", "--hc-remote nixl")) from None
    except OSError as error:
        raise ConfigError(
            f"--hc-remote nixl: {path} cannot be used ({error.strerror}); give a directory that "
            "this user can write to as dir of --hc-remote-config"
        ) from None
