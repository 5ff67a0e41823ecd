"""The thread that makes the JSON lines of a trace. Their meaning: docs/trace-format.md."""

from __future__ import annotations

import base64
import logging
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tiers.trace import TRACE_VERSION, Pseudonyms
from sglang_hc.tree.block_tree import BLOCK_BYTES
from sglang_hc.tree.identity import block_id, root_id

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 0.05

Event = tuple[Any, ...]
"""(op, seconds since the start, fields of the op's method of `TraceWriter` ...)"""


class TraceWriter:
    """Takes events from `queue`, which one other thread fills.

    Blocks get numbers at their first appearance, and a line with the number of the block before
    and the pseudonyms of their tokens; a path is the number of its last block. Requests get
    numbers, too: their ids can come from users. Both are remembered for as long as the server runs.
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
                    op, at, *fields = self.queue.popleft()
                    getattr(self, f"_{op}")(round(at, 4), *fields)
                self._file.flush()
                if last:
                    return
        except Exception:
            logger.exception("sglang-hc: writing the trace failed; it ends here")
            self.failed = True
            self.queue.clear()

    # One method per event; arguments are the fields given to `Recorder.note`

    def _arrive(self, at: float, rid: str, namespace: str | None, tokens: bytes) -> None:
        path = self._path(namespace, tokens)
        self._line({"op": "arrive", "t": at, "req": self._request(rid), "path": path})

    def _look(self, at: float, order: Sequence[str], needs: Mapping[str, Sequence[bytes]]) -> None:
        line = {"op": "look", "t": at, "order": [self._request(rid) for rid in order]}
        line["needs"] = {self._request(r): self._numbers_of(ids) for r, ids in needs.items()}
        self._line(line)

    def _discard(self, at: float, rid: str) -> None:
        self._line({"op": "discard", "req": self._request(rid)})

    def _passed(self, at: float, rid: str) -> None:
        self._line({"op": "passed", "t": at, "req": self._request(rid)})

    def _admit(
        self, at: float, rid: str, limit: int, device: int, hit: int, restored: int, disk: int
    ) -> None:
        line = {"op": "admit", "t": at, "req": self._request(rid), "limit": limit}
        self._line({**line, "device": device, "hit": hit, "restored": restored, "disk": disk})

    def _gone(self, at: float, rid: str) -> None:
        self._line({"op": "gone", "t": at, "req": self._request(rid)})

    def _finish(self, at: float, rid: str, namespace: str | None, tokens: bytes) -> None:
        path = self._path(namespace, tokens)
        self._line({"op": "finish", "t": at, "req": self._request(rid), "path": path})

    def _stage(self, at: float, slot: int | None, gone: list[int], spared: list[int]) -> None:
        self._line({"op": "stage", "slot": slot, "gone": gone, "spared": spared})

    def _unstage(self, at: float, slot: int) -> None:
        self._line({"op": "unstage", "slot": slot})

    def _publish(
        self,
        at: float,
        slot: int,
        under: int,
        namespace: str | None,
        parent: bytes,
        tokens: bytes,
        created: bool,
        gone: list[int],
    ) -> None:
        above = self._blocks.get(parent) or self._root(namespace)
        number = self._block(parent, above, tokens)[0]
        line = {"op": "publish", "slot": slot, "under": under, "block": number}
        self._line({**line, "created": created, "gone": gone})

    def _ready(self, at: float, slot: int) -> None:
        self._line({"op": "ready", "slot": slot})

    def _access(self, at: float, slots: list[int]) -> None:
        self._line({"op": "access", "slots": slots})

    def _pin(self, at: float, slots: list[int]) -> None:
        self._line({"op": "pin", "slots": slots})

    def _unpin(self, at: float, slots: list[int]) -> None:
        self._line({"op": "unpin", "slots": slots})

    def _hold(self, at: float, identity: bytes, on: bool) -> None:
        self._line({"op": "hold", "block": self._numbers_of([identity])[0], "on": on})

    def _evict(self, at: float, count: int, gone: list[int], spared: list[int]) -> None:
        self._line({"op": "evict", "count": count, "gone": gone, "spared": spared})

    def _drop(self, at: float, slot: int) -> None:
        self._line({"op": "drop", "slot": slot})

    def _clear(self, at: float) -> None:
        self._line({"op": "clear"})

    def _lost(self, at: float, events: int) -> None:
        self._line({"op": "lost", "events": events})

    def _end(self, at: float) -> None:
        self._line({"op": "end", "t": at})

    # Numbers

    def _path(self, namespace: str | None, tokens: bytes) -> int:
        """Number of the block that ends a sequence; of the root for an empty one."""
        parent, above = root_id(self._fingerprint, namespace), self._root(namespace)
        for start in range(0, len(tokens), BLOCK_BYTES):
            piece = tokens[start : start + BLOCK_BYTES]
            above = self._block(parent, above, piece)
            parent = block_id(self._fingerprint, parent, piece)
        return above[0]

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

    def _numbers_of(self, identities: Sequence[bytes]) -> list[int]:
        """Numbers of blocks. One that came by in an event that was left out has no tokens."""
        out = []
        for identity in identities:
            known = self._blocks.get(identity)
            if known is None:
                self._unseen.add(identity)
                known = self._name(identity, 0)
                self._line({"op": "block", "block": known[0], "parent": None, "tokens": ""})
            out.append(known[0])
        return out

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
