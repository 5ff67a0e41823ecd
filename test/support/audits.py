"""Servers whose blocks are audited, and what they have."""

from __future__ import annotations

import json
import random
from typing import Any

from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.core import Core

FLAGS = ("--hc-host-size-gb", "0.2", "--hc-restore", "always")
POOL = ("--max-total-tokens", "768")
ALL = ("--hc-audit", "1")


def prompt(seed: int, length: int = 200) -> list[int]:
    return random.Random(seed).choices(range(3, 900), k=length)


def server(form: str, *flags: str, dtype: str = "float32", **options: Any) -> Core:
    return Core("--hc-forms", form, "--dtype", dtype, *FLAGS, *POOL, *flags, **options)


def below(tier: str, folder: str) -> tuple[str, ...]:
    """Flags of what is below host memory."""
    if tier == "disk":
        return ("--hc-disk", f"{folder}:1")
    if tier == "remote":
        return ("--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": folder}))
    return ()


def leave(core: Core, tier: str) -> None:
    """All that is known leaves for this tier."""
    core.settle()
    if tier == "host":
        core.evict()
    else:
        assert core.scheduler.flush_cache()


def audit_all(core: Core) -> dict[str, int]:
    """Idle passes until nothing waits for its audit. Returns what was counted."""
    while core.tree.audit is not None and core.tree.audit.waiting:
        core.run()
    core.settle()
    return core.tree.tiers.counts()


def path_of(core: Core, tokens: list[int], salt: str | None = None) -> tuple[BlockNode, ...]:
    return core.tree.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).nodes
