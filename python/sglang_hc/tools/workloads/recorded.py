"""The load of a server (`--hc-trace`, format: `tiers.trace`): its requests at their times.

The file may come from anybody: types and sizes of each line are checked when it is read, and that
a line follows from those before when it is used.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from msgspec import Meta

from sglang_hc.errors import ConfigError, convert
from sglang_hc.tiers.trace import TRACE_VERSION, Served
from sglang_hc.tools.workloads.sessions import Ids, Session, Turn
from sglang_hc.tools.workloads.traces import TraceError, json_object, json_value
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES

Count = Annotated[int, Meta(ge=0, le=1 << 62)]

WITHOUT_TIMES = 2
"""The version before, which does not say how the server ran and when it answered."""


class _Named(TypedDict):
    op: Literal[
        "root", "block", "arrive", "passed", "admit", "first", "gone", "finish", "lost", "end"
    ]


class Event(_Named, total=False):
    """Of every line but the first. Which of the values an event has depends on its `op`."""

    t: Annotated[float, Meta(ge=0, lt=1e15)]
    req: Count
    block: Count
    parent: Count
    tokens: str
    path: Count
    device: Count
    hit: Count
    restored: Count
    disk: Count
    events: Count
    tool: Count


class Request(NamedTuple):
    """One request of a record. prompt: its blocks. answer: packed. Times in seconds: first: of its
    first token, None for one that left without; ended: when it was over. calls: see `Turn`."""

    arrived: float
    first: float | None
    ended: float
    prompt: tuple[Ids, ...]
    answer: bytes
    calls: str = ""

    @property
    def tokens(self) -> bytes:
        """The prompt, packed."""
        return b"".join(block.packed for block in self.prompt)


class Record(NamedTuple):
    """What a server was asked and how it ran. requests: by their arrival. lost: events."""

    served: Served
    requests: list[Request]
    lost: int


def recorded_sessions(path: Path, *, closed_loop: bool = False) -> list[Session]:
    """The sessions of a trace, by their arrival. Each is one request, at its time; with
    `closed_loop` a request that goes on where another ended is a later turn of it, as long after
    its answer as in the record. Raises TraceError."""
    requests, _ = _read(path)
    return [
        session_of(turns) for turns in (linked(requests) if closed_loop else map(_one, requests))
    ]


def read_record(path: Path) -> Record:
    """The requests of a trace with what the server made of them. Raises TraceError, also for one of
    the version before."""
    header = _header(path)
    if header.get("version") == WITHOUT_TIMES:
        raise TraceError(
            f"{path}: version {WITHOUT_TIMES} has no times of first tokens; record anew with this "
            "release"
        )
    values = {name: value for name, value in header.items() if name not in ("trace", "version")}
    try:
        served = convert(values, Served, f"{path}:1")
    except ConfigError as error:
        raise TraceError(str(error)) from None
    return Record(served, *_read(path))


def _read(path: Path) -> tuple[list[Request], int]:
    """The requests by their arrival, and how many events are missing. Raises TraceError."""
    lost = 0

    def counted() -> Iterator[dict[str, Any]]:
        nonlocal lost
        for event in _events(path):
            lost += event.get("events", 0) if event["op"] == "lost" else 0
            yield event

    try:
        requests = sorted(_requests(counted()), key=lambda request: request.arrived)
    except TraceError:
        raise
    except (KeyError, ValueError) as cause:
        raise TraceError(f"{path}: a record that does not fit together ({cause!r})") from cause
    return requests, lost


def _header(path: Path) -> dict[str, Any]:
    """The first line. Raises TraceError for what is no trace of a version that is read here."""
    with path.open("rb") as file:  # what follows may be no text
        header = json_object(file.readline().decode(errors="replace") or "{}", f"{path}:1")
    if header.get("trace") != "sglang-hc":
        raise TraceError(f"{path}: not what a server's --hc-trace writes")
    if header.get("version") not in (WITHOUT_TIMES, TRACE_VERSION):
        raise TraceError(
            f"{path}: version {str(header.get('version'))[:20]}; this release reads versions "
            f"{WITHOUT_TIMES} and {TRACE_VERSION} of --hc-trace"
        )
    return header


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Each event as `Event` has it; a last line that was cut off is left out. Raises TraceError."""
    _header(path)
    with path.open(encoding="utf-8") as file:
        next(file)
        for number, line in enumerate(file, 2):
            if line.endswith("\n"):
                yield {**json_value(line, Event, f"{path}:{number}")}


class _Paths:
    """What ends in a block, by its number. Blocks that paths share are there once."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int | None, Ids]] = {}

    def define(self, number: int, parent: int | None, tokens: bytes) -> None:
        """A block comes after its parent. Raises KeyError, ValueError."""
        if number in self._blocks:  # defined anew it could be above itself
            raise ValueError(f"block {number} comes twice")
        if parent is not None and parent not in self._blocks:
            raise KeyError(parent)
        if len(tokens) > BLOCK_BYTES or len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(tokens)} bytes are no tokens of a block")
        self._blocks[number] = (parent, Ids(tokens))

    def ending_in(self, number: int) -> tuple[Ids, ...]:
        """The blocks of a path, first one first. Raises KeyError."""
        found = []
        step: int | None = number
        while step is not None:
            step, tokens = self._blocks[step]
            found.append(tokens)
        return tuple(reversed(found[:-1]))  # the root has no tokens


def _requests(events: Iterable[dict[str, Any]]) -> list[Request]:
    """The requests that were queued; retracted ones count once.

    An answer is what a finished request has beyond its prompt. Raises KeyError or ValueError for a
    trace that makes no sense.
    """
    paths = _Paths()
    arrived: dict[int, tuple[float, tuple[Ids, ...]]] = {}
    answered: dict[int, float] = {}
    requests: list[Request] = []
    for event in events:
        op = event["op"]
        if op == "root":
            paths.define(event["block"], None, b"")
        elif op == "block":
            tokens = base64.b64decode(event["tokens"])
            paths.define(event["block"], event["parent"], tokens)
        elif op == "arrive" and event["req"] not in arrived:
            arrived[event["req"]] = event["t"], paths.ending_in(event["path"])
        elif op == "first":
            answered[event["req"]] = event["t"]
        elif op in ("finish", "gone") and event["req"] in arrived:
            at, prompt = arrived.pop(event["req"])
            answer = b""
            if op == "finish":
                computed = b"".join(block.packed for block in paths.ending_in(event["path"]))
                answer = computed[sum(len(block.packed) for block in prompt) :]
            first = answered.pop(event["req"], None)
            if prompt:
                calls = f"tool {event['tool']}" if "tool" in event else ""
                requests.append(Request(at, first, event["t"], prompt, answer, calls))
    return requests


def _one(request: Request) -> list[Request]:
    return [request]


def linked(requests: Sequence[Request]) -> list[list[Request]]:
    """Requests, by their arrival, as the turns of conversations: a later one begins with the whole
    prompt and the answer of the one before, which had ended. Where two go on from the same end the
    second one begins a conversation."""
    talks: list[list[Request]] = []
    ends: dict[int, dict[bytes, int]] = {}  # by length: digest -> conversation
    for request in requests:
        prompt = request.tokens
        before: tuple[int, bytes] | None = None
        hashed, read = hashlib.blake2b(digest_size=16), 0
        for length in sorted(n for n in ends if n < len(prompt)):
            hashed.update(prompt[read:length])
            read, digest = length, hashed.digest()
            index = ends[length].get(digest)
            if index is not None and talks[index][-1].ended <= request.arrived:
                before = length, digest
        if before is None:
            found = len(talks)
            talks.append([])
        else:
            found = ends[before[0]].pop(before[1])
            if not ends[before[0]]:
                del ends[before[0]]
        talks[found].append(request)
        if request.answer:
            whole = prompt + request.answer
            digest = hashlib.blake2b(whole, digest_size=16).digest()
            ends.setdefault(len(whole), {})[digest] = found
    return talks


def session_of(turns: Sequence[Request]) -> Session:
    """The first one arrives at its time, the others as long after the answer as they did."""
    made, before = [], None
    for request in turns:
        turn = Turn(request.prompt, Ids(request.answer), calls=request.calls)
        if before is None:
            made.append(replace(turn, at=request.arrived))
        else:
            made.append(replace(turn, think=request.arrived - before.ended))
        before = request
    return Session(turns[0].arrived, tuple(made), whole=True)
