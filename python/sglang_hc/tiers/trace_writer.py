"""The thread that makes the JSON lines of a trace. Their meaning: `tiers.trace`."""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tiers.trace import TRACE_VERSION, Pseudonyms
from sglang_hc.tree.identity import Prefix, block_id, root_id

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 0.05


Event = tuple[str, Mapping[str, Any]]
"""(op, fields): plain values, and what `TraceWriter` writes as numbers."""


class TraceWriter:
    """Takes events from `queue`, which one other thread fills, and writes them as lines of JSON.

    Request ids can come from users, so requests are written as numbers. A block gets a number at
    its first appearance, with a line that has the number of the block before it and the pseudonyms
    of its tokens. All numbers are remembered for as long as the server runs. These fields of events
    become numbers:

        req     a request id                      order   request ids
        path    a `Prefix`: its last block
        block   a block's identity, or the namespace, parent's identity and packed tokens of one
        needs   block identities by request id
    """

    def __init__(self, path: Path, header: Mapping[str, object], fingerprint: bytes) -> None:
        self.queue: deque[Event] = deque()
        self.failed = False
        self._fingerprint = fingerprint
        self._names = Pseudonyms(BLOCK_TOKENS)
        self._blocks: dict[bytes, tuple[int, int]] = {}  # identity: (number, state behind it)
        self._count = 0
        self._unseen: set[bytes] = set()  # named without having come by
        self._requests: dict[str, int] = {}
        self._numbers: dict[str, Callable[[Any], object]] = {
            "req": self._request,
            "order": lambda rids: [self._request(rid) for rid in rids],
            "path": self._path,
            "block": lambda one: self._known(one) if isinstance(one, bytes) else self._child(*one),
            "needs": self._needs,
        }
        self._file = open(path, "xb", opener=_private)  # noqa: SIM115
        self._line({"trace": "sglang-hc", "version": TRACE_VERSION, **header})
        self._file.flush()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hc-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        try:
            while True:
                last = self._stop.wait(WRITE_EVERY_S)
                while self.queue:
                    self._event(*self.queue.popleft())
                self._file.flush()
                if last:
                    return
        except Exception:
            logger.exception("sglang-hc: writing the trace failed; it ends here")
            self.failed = True
            self.queue.clear()

    def _event(self, op: str, fields: Mapping[str, Any]) -> None:
        number = self._numbers
        plain = {n: number[n](value) if n in number else value for n, value in fields.items()}
        self._line({"op": op, **plain})

    # Numbers

    def _path(self, prefix: Prefix) -> int:
        """Number of the block that ends a sequence; of the root for an empty one."""
        parent, above = root_id(self._fingerprint, prefix.namespace), self._root(prefix.namespace)
        for index in range(-(-prefix.num_tokens // BLOCK_TOKENS)):
            piece = prefix.block(index)
            above = self._block(parent, above, piece)
            parent = block_id(self._fingerprint, parent, piece)
        return above[0]

    def _child(self, namespace: str | None, parent: bytes, tokens: bytes) -> int:
        above = self._blocks.get(parent) or self._root(namespace)
        return self._block(parent, above, tokens)[0]

    def _needs(self, blocks: Mapping[str, Sequence[bytes]]) -> dict[int, list[int]]:
        return {self._request(r): [self._known(i) for i in ids] for r, ids in blocks.items()}

    def _root(self, namespace: str | None) -> tuple[int, int]:
        identity = root_id(self._fingerprint, namespace)
        known = self._blocks.get(identity)
        if known is None:
            known = self._name(identity, self._names.start(namespace))
            self._line({"op": "root", "block": known[0]})
        return known

    def _block(self, parent: bytes, above: tuple[int, int], tokens: bytes) -> tuple[int, int]:
        identity = block_id(self._fingerprint, parent, tokens)
        known = self._blocks.get(identity)
        if known is None or identity in self._unseen:
            self._unseen.discard(identity)
            pseudonyms, state = self._names.block(above[1], tokens)
            known = self._name(identity, state)
            text = base64.b64encode(pseudonyms).decode()
            self._line({"op": "block", "block": known[0], "parent": above[0], "tokens": text})
        return known

    def _known(self, identity: bytes) -> int:
        """Number of a block. One that came by in an event that was left out has no tokens."""
        known = self._blocks.get(identity)
        if known is None:
            self._unseen.add(identity)
            known = self._name(identity, 0)
            self._line({"op": "block", "block": known[0], "parent": None, "tokens": ""})
        return known[0]

    def _name(self, identity: bytes, state: int) -> tuple[int, int]:
        self._blocks[identity] = named = (self._count, state)
        self._count += 1
        return named

    def _request(self, rid: str) -> int:
        return self._requests.setdefault(rid, len(self._requests))

    def _line(self, fields: Mapping[str, object]) -> None:
        self._file.write(msgspec.json.encode(fields) + b"\n")


def _private(path: str, flags: int) -> int:
    """Which prompts share how much is nobody else's business."""
    return os.open(path, flags, 0o600)
