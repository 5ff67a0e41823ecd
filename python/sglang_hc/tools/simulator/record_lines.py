"""What a line of a record (`--hc-trace`, format: `tiers.trace`) may hold.

The file may come from anybody. Types and sizes are checked here, once for all that read records;
whether a line follows from those before is found out by who uses it.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal, TypedDict

from msgspec import Meta

from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES

NONSENSE = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError,
            AssertionError)  # fmt: skip
"""What replaying raises for lines of the right types that do not follow from each other."""

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Slots = Annotated[int, Meta(ge=1, le=1 << 26)]
"""Of a host tier: in 1 TiB are so many of 16 KiB, and a replay takes memory for each."""


class Header(TypedDict, total=False):
    """Of the first line; others of its values are not read."""

    host_slots: Slots
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    eviction: str


class _Named(TypedDict):
    op: Literal["root", "block", "arrive", "look", "discard", "admit", "passed", "gone", "finish",
                "stage", "unstage", "publish", "ready", "access", "pin", "unpin", "hold", "evict",
                "drop", "clear", "lost", "end"]  # fmt: skip


class Event(_Named, total=False):
    """Of every other line. Which of the values an event has depends on its `op`."""

    t: float
    req: Count
    block: Count
    parent: Count | None
    tokens: str
    path: Count
    order: list[Count]
    needs: dict[str, list[Count]]
    limit: Count
    device: Count
    hit: Count
    restored: Count
    disk: Count
    slot: Count | None
    under: Annotated[int, Meta(ge=-1, le=1 << 62)]
    created: bool
    slots: list[Count]
    on: bool
    count: Count
    gone: list[Count]
    spared: list[Count]
    events: Count


def block_tokens(event: dict[str, Any]) -> bytes:
    """Packed tokens of a `block`. Raises ValueError."""
    tokens = base64.b64decode(event["tokens"])
    if len(tokens) > BLOCK_BYTES or len(tokens) % TOKEN_BYTES:
        raise ValueError(f"{len(tokens)} bytes are no tokens of a block")
    return tokens
