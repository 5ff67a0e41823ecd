"""Blocks in a store that many hosts share (docs/remote.md)."""

from sglang_hc.store.remote.backend import Frames, RemoteBackend
from sglang_hc.store.remote.blocks import RemoteBlocks
from sglang_hc.store.remote.chain import Chain
from sglang_hc.store.remote.store import Found, RemoteStore, StoreIo

__all__ = ["Chain", "Found", "Frames", "RemoteBackend", "RemoteBlocks", "RemoteStore", "StoreIo"]
