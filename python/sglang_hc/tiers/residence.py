"""What the tiers hold, told as it changes: the one place where each tier reports for KV events.

    host memory   each block that joins the tree or leaves it, with its tokens
    below         each identity that came or left; whose tokens those are, the ledger finds out

A block counts as held from the moment that it is the tree's, a little before its bytes are
complete: so it is in host memory before the device lets it go. End parts are not told: a router
asks for tokens, and what of them can be continued it learns from nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sglang_hc.policy.cost_model import SourceTier
from sglang_hc.store.block_io import Change
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.host_tier import HostTier


class Named(NamedTuple):
    """A block with its tokens (packed). parent_id: of the block before it; None for the first of a
    path."""

    block_id: bytes
    parent_id: bytes | None
    namespace: str | None
    tokens: bytes


class Came(NamedTuple):
    """A tier has this block now."""

    tier: SourceTier
    block: Named


class Anew(NamedTuple):
    """Whatever was told before is void; everything that is there follows. weights: see
    `namespaces.Namespace`; what others made is not told."""

    weights: str | None = None


Note = Came | Change | Anew


class Residence:
    """Belongs to the scheduler thread. tell: takes each note, in the order of what happened."""

    def __init__(
        self, host: HostTier, disk: LowerTier | None, tell: Callable[[Note], object]
    ) -> None:
        self._host, self._disk, self._tell = host, disk, tell
        host.on_change = self._host_changed

    def poll(self) -> None:
        """Tell what came or left below host memory. Called behind `LowerTier.poll`."""
        if self._disk is not None:
            for change in self._disk.news():
                self._tell(change)

    def tell_all(self) -> None:
        """Tell everything anew, parents before children."""
        for node in self._host.tree.nodes():
            self._host_changed(node, True)
        if self._disk is not None:
            for change in self._disk.news(anew=True):
                self._tell(change)

    def _host_changed(self, node: BlockNode, here: bool) -> None:
        if not here:
            self._tell(Change(SourceTier.HOST, node.block_id, False))
            return
        parent = node.parent
        assert parent is not None
        above = None if parent.is_root else parent.block_id
        block = Named(node.block_id, above, node.namespace, node.tokens)
        self._tell(Came(SourceTier.HOST, block))
