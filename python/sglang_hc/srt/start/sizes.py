"""The sizes of a server's tiers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hc.forms import BlockLayout


@dataclass(frozen=True)
class TierSizes:
    """layout: of this rank's part of a block. num_slots: blocks of the host tier. fingerprint: what
    identities of blocks begin with, the same on all ranks."""

    layout: BlockLayout
    num_slots: int
    fingerprint: bytes
