"""What a trace of a server holds: its format, its writer, and token ids made unreadable.

A trace (`--hc-trace`) is a file of JSON objects, one a line: a header, then events in the order of
the scheduler thread. `tiers.recording` writes it, `tools.simulator.recorded` replays it. It must
show which prompts share how many tokens, and nothing else of them.

Header: `trace` ("sglang-hc"), `version`, `host_slots`, `slot_bytes`, `layer_plan`, `page_size`,
`eviction` and `prefetch` as served.

Events, by `op`. Blocks are numbered in order of appearance, requests as they came; a block in the
host tier is named by its slot. `t`: seconds since the start. `gone`: slots whose blocks left, in
this order. `spared`: slots kept for sooner requests.

    root       block                   a namespace
    block      block, parent, tokens   a block after another; shifted ids, big-endian int32, base64
    arrive     t, req, path            queued; `path` is the last block of its prompt
    look       t, order, needs         the eviction window, next first; needs of those that came in
    discard    req                     left the window
    admit      t, req, limit, device, hit, restored, disk
                                       of the first `limit` tokens `device` were on the device and
                                       `hit` more in the tiers; `restored` came back, `disk` of them
                                       were read for this request
    passed     t, req                  its state was still on the way; once until it is admitted
    gone       t, req                  left the queue unserved
    finish     t, req, path            is over
    stage      slot, gone, spared      a free slot was wanted (null: there was none)
    unstage    slot                    it was not needed
    publish    slot, under, block, created, gone
                                       the slot holds this block, below slot `under` (-1: a root)
    ready      slot                    its bytes are in place and can be hit
    access, pin, unpin   slots         used, root first; kept from leaving; no longer kept
    hold       block, on               pinned for its session, or released
    evict      count, gone, spared     room was wanted
    drop       slot                    a block was dropped
    clear                              all were
    lost       events                  this many events are missing
    end        t                       the server stopped in order
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.requests import Serial
from sglang_hc.tree.identity import Prefix, block_id, root_id

logger = logging.getLogger(__name__)

TRACE_VERSION = 1

TOKEN_LIMIT = 1 << 30
"""Token ids from here on cannot be made unreadable; no vocabulary comes near."""

_WORD = 1 << 64
_TOKEN_BITS = 30


class Pseudonyms:
    """Token ids shifted by a secret number that depends on all tokens before them.

    Two sequences agree in as many leading ids after as before, and where they part the smaller id
    stays the smaller one: a radix tree over pseudonyms has the shape of the tree over tokens. The
    secret is drawn anew for each trace and kept nowhere.
    """

    def __init__(self) -> None:
        base = secrets.randbits(64) | 1
        self._key = secrets.token_bytes(16)
        back = pow(base, -1, _WORD)
        self._powers = _powers(base, BLOCK_TOKENS + 1)
        self._inverse = _powers(back, BLOCK_TOKENS + 1)

    def start(self, namespace: str | None) -> int:
        """State before the first token of a namespace's sequences."""
        text = b"none" if namespace is None else b"some" + namespace.encode("utf-8", "replace")
        return int.from_bytes(
            hashlib.blake2b(text, digest_size=8, key=self._key).digest(), "little"
        )

    def block(self, state: int, tokens: bytes) -> tuple[bytes, int]:
        """Pseudonyms of one packed block, packed, and the state behind it.

        Raises OverflowError for an id from TOKEN_LIMIT on.
        """
        ids = np.frombuffer(tokens, dtype=">i4").astype(np.uint64)
        if int(ids.max(initial=0)) >= TOKEN_LIMIT:
            raise OverflowError(f"token ids from {TOKEN_LIMIT} on cannot be recorded")
        count = len(ids)
        sums = np.zeros(count + 1, dtype=np.uint64)
        np.cumsum((ids + np.uint64(1)) * self._inverse[1 : count + 1], out=sums[1:])
        states = (np.uint64(state) + sums) * self._powers[: count + 1]  # modulo 2**64
        shifts = _mixed(states[:count]) >> np.uint64(64 - _TOKEN_BITS)
        return (ids + shifts).astype(">i4").tobytes(), int(states[count])


def _powers(base: int, count: int) -> np.ndarray:
    return np.array([pow(base, i, _WORD) for i in range(count)], dtype=np.uint64)


def _mixed(values: np.ndarray) -> np.ndarray:
    """Every bit of the output depends on every bit of the input (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)))


WRITE_EVERY_S = 0.05


Event = tuple[str, Mapping[str, Any]]
"""(op, fields): plain values, and what `TraceWriter` writes as numbers."""


class TraceWriter:
    """Takes events from `queue`, which one other thread fills, and writes them as lines of JSON.

    Requests are named by their numbers; the ids that clients give them are never written. A block
    gets a number at its first appearance, with a line that has the number of the block before it
    and the pseudonyms of its tokens. All of these are remembered for as long as the server runs.
    These fields of events become numbers:

        path    a `Prefix`: its last block
        block   a block's identity, or the namespace, parent's identity and packed tokens of one
        needs   block identities by request
    """

    def __init__(self, path: Path, header: Mapping[str, object], fingerprint: bytes) -> None:
        self.queue: deque[Event] = deque()
        self.failed = False
        self._fingerprint = fingerprint
        self._names = Pseudonyms()
        self._blocks: dict[bytes, tuple[int, int]] = {}  # identity: (number, state behind it)
        self._count = 0
        self._unseen: set[bytes] = set()  # named without having come by
        self._numbers: dict[str, Callable[[Any], object]] = {
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

    def _run(self) -> None:
        try:
            with closing(self._file):
                last = False
                while not last:
                    last = self._stop.wait(WRITE_EVERY_S)
                    while self.queue:
                        self._event(*self.queue.popleft())
                    self._file.flush()
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

    def _needs(self, blocks: Mapping[Serial, Sequence[bytes]]) -> dict[int, list[int]]:
        return {r: [self._known(i) for i in ids] for r, ids in blocks.items()}

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

    def _line(self, fields: Mapping[str, object]) -> None:
        self._file.write(msgspec.json.encode(fields) + b"\n")


def _private(path: str, flags: int) -> int:
    """Which prompts share how much is nobody else's business."""
    return os.open(path, flags, 0o600)
