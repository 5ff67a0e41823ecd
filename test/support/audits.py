"""Servers whose blocks are audited, and what they have."""

from __future__ import annotations

from typing import Any

from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core
from support.prompts import in_store, on_disk

FLAGS = ("--hc-host-size-gb", "0.2", "--hc-restore", "always")
POOL = ("--max-total-tokens", "768")
ALL = ("--hc-audit", "1")


def server(form: str, *flags: str, dtype: str = "float32", **options: Any) -> Core:
    return Core("--hc-forms", form, "--dtype", dtype, *FLAGS, *POOL, *flags, **options)


def below(tier: str, folder: str) -> tuple[str, ...]:
    """Flags of what is below host memory."""
    flags = {"host": (), "disk": on_disk(folder), "remote": in_store(folder)}
    return flags[tier]


def leave(core: Core, tier: str) -> None:
    """All that is known leaves for this tier."""
    if tier != "host":
        return core.forget()
    core.settle()
    return core.evict()


def audit_all(core: Core) -> dict[str, int]:
    """Idle passes until nothing waits for its audit. Returns what was counted."""
    while core.tree.audit is not None and core.tree.audit.waiting:
        core.run()
    core.settle()
    return core.tree.tiers.counts()


def path_of(core: Core, tokens: list[int], salt: str | None = None) -> tuple[BlockNode, ...]:
    return core.tree.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).nodes
