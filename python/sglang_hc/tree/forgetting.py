"""What is to be forgotten: the namespaces of one client, or what belongs to a prefix there.

A client is named by its cache salt and extra key. Its namespaces are its own one, and those behind
its cuts and of adapters (`namespaces.py`). Labels on disk are cut off at a number of bytes; where
that hides whose a label is, it counts as the client's. So nothing of a client is ever left, and
somebody else may have to compute again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sglang_hc.tree.identity import BLOCK_BYTES
from sglang_hc.tree.images import may_begin_with
from sglang_hc.tree.namespaces import Namespace

_SPARE_BYTES = 4
"""A label that is so near to its limit may have been cut off: a character takes up to 4 bytes."""

FORGOTTEN = "\x1fhc-forgotten/"
"""How the namespaces begin that hold on a device what was forgotten while it was in use. Those of
clients are packed and begin otherwise; nothing of these is kept."""


def hidden_namespace(hidden: str, namespace: str | None) -> str:
    """What a namespace is called of which something stays on the device until its requests end.
    Those of one client stay apart: with another adapter the same tokens have other K and V."""
    return f"{hidden}/{namespace or ''}"


class Stored(NamedTuple):
    """What a stored block says of itself: see `store.disk.format.BlockHeader`. An end part has no
    tokens."""

    parent: bytes
    position: int
    tokens: bytes


@dataclass(frozen=True)
class Forgetting:
    """The namespaces of a client, as `namespaces.client_namespace` names it. tokens: packed; only
    what may continue them, or is continued by them, where blocks are stored one by one. Empty:
    everything."""

    client: str | None
    tokens: bytes = b""

    def names(self, namespace: str | None) -> bool:
        """Whether this namespace is one of the client's."""
        return Namespace.of(namespace).client == Namespace.of(self.client)

    def may_name(self, label: str, most: int) -> bool:
        """Whether a label of at most `most` bytes may be of one of the client's namespaces."""
        if len(label.encode()) > most - _SPARE_BYTES:
            own = self.client or ""
            return label.startswith(own) or own.startswith(label)
        return self.names(label or None)

    def names_block(self, label: str, block: Stored, known: Mapping[bytes, Stored]) -> bool:
        """Whether a stored block of such a label is forgotten: unless a block of its path has other
        tokens than the prefix. known: blocks by identity. Where the path has a gap, or is behind a
        cut, nothing shows that."""
        parts = Namespace.of(label or None)
        was_cut_off = (parts.pack() or "") != label
        if not self.tokens or parts.cut is not None or was_cut_off:
            return True
        above: Stored | None = block
        while above is not None:
            start = above.position * BLOCK_BYTES
            wanted = self.tokens[start : start + BLOCK_BYTES]
            if above.tokens and not may_begin_with(above.tokens, wanted):
                return False
            above = known.get(above.parent)
        return True
