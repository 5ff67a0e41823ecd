"""Blocks in a store that many hosts share (docs/remote.md)."""

from sglang_hc.store.remote.backend import CALLS, Frames, RemoteBackend
from sglang_hc.store.remote.store import RemoteStore

__all__ = ["CALLS", "Frames", "RemoteBackend", "RemoteStore"]
