"""What the tiers of a server are made of: their classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_hc.queue.requests import Serial
from sglang_hc.queue.windows import LookAhead
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.tree.host_tier import HostTier


@dataclass(frozen=True)
class TierFactories:
    """What is built as the look-ahead window, the host tier and the tree: these classes, or those
    that record what they are told (`recorded_tree.py`)."""

    window: Callable[[], LookAhead[Serial]] = LookAhead
    host: Callable[..., HostTier] = HostTier
    tree: Callable[..., HcRadixCache] = HcRadixCache
