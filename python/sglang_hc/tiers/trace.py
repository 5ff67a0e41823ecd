"""The load of a server, recorded (`--hc-trace`): its format, its writer, its token ids disguised.

A trace is a file of JSON objects, one a line: a header, then events in the order of the scheduler
thread. `sglang-hc simulate` and `capacity` read it. It shows which prompts share how many tokens,
and nothing else of them.

Header: `trace` ("sglang-hc"), `version`, and how the server runs, `Served` by its fields.

Events, by `op`. Blocks are numbered in order of appearance, requests as they came. `t`: seconds
since the start.

    root       block                   a namespace
    block      block, parent, tokens   a block after another; shifted ids, big-endian int32, base64
    arrive     t, req, path            queued; `path` is the last block of its prompt
    passed     t, req                  its state was still on the way; once until it is admitted
    admit      t, req, device, hit, restored, disk
                                       `device` tokens were on the device and `hit` more in the
                                       tiers; `restored` came back, `disk` of them were read for
                                       this request
    first      t, req                  has its first token
    gone       t, req                  left the queue unserved
    finish     t, req, path [, tool]   is over; `path` is all that was computed, `tool` the number
                                       of the tool that the answer calls
    lost       events                  this many events are missing
    end        t                       the server stopped in order

A server without tiers (`--hc-disable`) has `arrive`, `first` and `finish` alone. Version 2, which
`simulate` and `capacity` read too, has no `first` and less in its header.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.queue.requests import Serial
from sglang_hc.tree.identity import Prefix, block_id, root_id
from sglang_hc.tree.images import FIRST_ID

logger = logging.getLogger(__name__)

TRACE_VERSION = 3

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Size = Annotated[int, Meta(ge=1, le=1 << 62)]

_WORD = 1 << 64
_TOKEN_BITS = 30


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How a server runs, as far as its times depend on it.

    model: what is served on which device, in the words of a profile's fingerprint. context: of the
    model, in tokens. kv_tokens: of the KV pool. running: requests at once, at most. chunk: tokens
    of prompts in a pass; 0 for whole prompts. mixed: requests decode in such passes. overlap: the
    scheduler looks at the results of a pass when the next one runs. The rest is of
    the tiers, and has these defaults on a server without: blocks that fit into host memory and on
    disk, bytes of a block, the options as served, and whether there is a remote store.
    """

    model: str
    context: Size
    kv_tokens: Size
    page_size: Size
    running: Size
    chunk: Count
    mixed: bool
    overlap: bool = True
    host_slots: Count = 0
    disk_slots: Count = 0
    slot_bytes: Count = 0
    layer_plan: str = ""
    eviction: Literal["none", "queue", "learned", "lru"] = "none"
    prefetch: Literal["queue", "on-arrival", "off"] = "off"
    schedule: Literal["off", "ready-first"] = "off"
    restore: Literal["cost", "always"] = "cost"
    write: str = "all"
    remote: bool = False


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
        """Pseudonyms of one packed block, packed, and the state behind it. Of ids that stand for an
        image, the bits below FIRST_ID count: there is room for no more."""
        ids = np.frombuffer(tokens, dtype=">i4").astype(np.uint64) % np.uint64(FIRST_ID)
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
"""How often the writer looks for events."""

QUEUED_EVENTS = 200_000
"""Events that may wait to be written; beyond it they are left out and counted."""

Event = tuple[str, Mapping[str, Any]]
"""(op, fields): plain values, as `path` a `Prefix`, which `TraceWriter` writes as the number of its
last block, and as `tool` a name."""


class Recorder:
    """Takes note of requests; the scheduler thread calls everything here.

    It only appends to a bounded queue. A writer thread makes token ids unreadable and writes the
    lines. What it cannot keep up with is left out and counted, and the file says where. What is
    told of a request that never arrived is not taken.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, object],
        fingerprint: bytes,
        limit: int = QUEUED_EVENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises FileExistsError or another OSError when the file cannot be made."""
        self._writer = TraceWriter(path, header, fingerprint)
        self._limit = limit
        self._lost = 0
        self._clock = clock
        self._started = clock()
        self._matched: dict[Serial, dict[str, int]] = {}
        self._passed: set[Serial] = set()
        self._open: dict[Serial, bool] = {}
        """Requests that came and are not over, and whether each has a token."""
        self.events = 0
        self.dropped = 0

    def arrived(self, request: Serial, prompt: Prefix) -> None:
        """A request with this prompt was queued, or queued again."""
        self._open.setdefault(request, False)
        self._note("arrive", req=request, path=prompt)

    def matched(self, request: Serial, on_device: int, hit: int) -> None:
        """A request was looked up: `hit` tokens are in the tiers beyond those on the device.

        Becomes an event when the request is admitted before it is looked up again.
        """
        self._matched[request] = {"device": on_device, "hit": hit}

    def passed_over(self, request: Serial) -> None:
        """The request could have been admitted, but its state is still on the way."""
        if request in self._open and request not in self._passed:
            self._passed.add(request)
            self._note("passed", req=request)

    def admitted(self, request: Serial, restored: int, from_disk: int) -> None:
        """The request is in a batch; `restored` tokens of its hit come back from the tiers."""
        match = self._matched.pop(request, None)
        self._passed.discard(request)
        if match is not None and request in self._open:
            self._note("admit", req=request, **match, restored=restored, disk=from_disk)

    def is_open(self, request: Serial) -> bool:
        """Whether it came, and is not over."""
        return request in self._open

    def answered(self, request: Serial) -> None:
        """The request has a token; only its first one counts, also when it was queued again."""
        if self._open.get(request) is False:
            self._open[request] = True
            self._note("first", req=request)

    def gone(self, request: Serial) -> None:
        """The request left the queue without being admitted."""
        self._matched.pop(request, None)
        self._passed.discard(request)
        if self._open.pop(request, None) is not None:
            self._note("gone", req=request)

    def finished(self, request: Serial, computed: Prefix, tool: str = "") -> None:
        """The request is over; `computed` is what was computed of prompt and answer, which calls
        this tool."""
        self._matched.pop(request, None)
        if self._open.pop(request, None) is not None:
            called = {"tool": tool} if tool else {}
            self._note("finish", req=request, path=computed, **called)

    def stats(self) -> dict[str, object]:
        """Plain numbers for /server_info and the metrics."""
        return {"trace_events": self.events, "trace_dropped": self.dropped}

    def close(self) -> None:
        """Write what is queued and close the file."""
        self._limit += 2  # room for the last words
        self._note("end")
        self._writer.close()

    def _note(self, op: str, **fields: Any) -> None:
        """One event. Its fields must not change afterwards."""
        queue = self._writer.queue
        if len(queue) >= self._limit or self._writer.failed:
            self._lost += 1
            self.dropped += 1
            return
        if self._lost:
            queue.append(("lost", {"events": self._lost}))
            self._lost = 0
        queue.append((op, {"t": round(self._clock() - self._started, 4), **fields}))
        self.events += 1


class TraceWriter:
    """Takes events from `queue`, which one other thread fills, and writes them as lines of JSON.

    Requests and tools are named by their numbers; what clients call them is never written. A block
    gets a number at its first appearance, with a line that has the number of the block before it
    and the pseudonyms of its tokens. All of these are remembered for as long as the server runs.
    """

    def __init__(self, path: Path, header: Mapping[str, object], fingerprint: bytes) -> None:
        self.queue: deque[Event] = deque()
        self.failed = False
        self._fingerprint = fingerprint
        self._names = Pseudonyms()
        self._blocks: dict[bytes, tuple[int, int]] = {}  # identity: (number, state behind it)
        self._tools: dict[str, int] = {}
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
        named = {"path": self._path(fields["path"])} if "path" in fields else {}
        if "tool" in fields:
            named["tool"] = self._tools.setdefault(fields["tool"], len(self._tools))
        self._line({"op": op, **fields, **named})

    def _path(self, prefix: Prefix) -> int:
        """Number of the block that ends a sequence; of the root for an empty one."""
        identity, above = root_id(self._fingerprint, prefix.namespace), self._root(prefix.namespace)
        for index in range(-(-prefix.num_tokens // BLOCK_TOKENS)):
            tokens = prefix.block(index)
            identity = block_id(self._fingerprint, identity, tokens)
            above = self._blocks.get(identity) or self._block(identity, above, tokens)
        return above[0]

    def _root(self, namespace: str | None) -> tuple[int, int]:
        identity = root_id(self._fingerprint, namespace)
        known = self._blocks.get(identity)
        if known is None:
            known = self._name(identity, self._names.start(namespace))
            self._line({"op": "root", "block": known[0]})
        return known

    def _block(self, identity: bytes, above: tuple[int, int], tokens: bytes) -> tuple[int, int]:
        pseudonyms, state = self._names.block(above[1], tokens)
        named = self._name(identity, state)
        text = base64.b64encode(pseudonyms).decode()
        self._line({"op": "block", "block": named[0], "parent": above[0], "tokens": text})
        return named

    def _name(self, identity: bytes, state: int) -> tuple[int, int]:
        self._blocks[identity] = named = (len(self._blocks), state)
        return named

    def _line(self, fields: Mapping[str, object]) -> None:
        self._file.write(msgspec.json.encode(fields) + b"\n")


def _private(path: str, flags: int) -> int:
    """Which prompts share how much is nobody else's business."""
    return os.open(path, flags, 0o600)
