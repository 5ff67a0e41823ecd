"""A server's run, replayed: the recorded calls on the simulator's own tree, host tier and policies.

The record (`--hc-trace`, format: `tiers.trace`) says what the tiers were asked: which requests
waited, which slots were wanted, what was stored and used. What they answer is worked out anew: how
many tokens of a request are hit, and which blocks leave. The first answer that is not the
server's ends the replay, because all that follows would differ too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hc.policy.eviction import POLICIES, EvictionPolicy, IsProtected, make_policy
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tiers.trace import TRACE_VERSION
from sglang_hc.tools.simulator.record_lines import NONSENSE, Event, Header, block_tokens
from sglang_hc.tools.workloads.traces import TraceError, json_object, json_value
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, block_id, root_id

FINGERPRINT = b"sglang-hc replay"


@dataclass(frozen=True)
class Difference:
    """The first answer that is not the server's, and the line of the record it belongs to."""

    line: int
    what: str
    recorded: object
    replayed: object


@dataclass
class Comparison:
    """What was compared. Tokens and blocks are those of the replay, up to a difference.

    hit_tokens: from the tiers, disk_tokens of them read from disk for the request, late_tokens
    of them by requests that were passed over because they were still on the way. evictions: blocks
    that made room. lost_line: where the record has a gap; the replay ends there. whole: the server
    ended the file.
    """

    admissions: int = 0
    hit_tokens: int = 0
    disk_tokens: int = 0
    late_tokens: int = 0
    device_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    lines: int = 0
    lost_line: int | None = None
    whole: bool = False
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        return self.difference is None and self.lost_line is None


class _WatchedTier(HostTier):
    """Notes the slots whose blocks leave."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gone: list[int] = []

    def _retire(self, node: BlockNode) -> None:
        self.gone.append(node.slot)
        super()._retire(node)


class _Held:
    """Blocks that the record says are pinned for their sessions."""

    def __init__(self) -> None:
        self._ids: set[bytes] = set()
        self._listeners: list[Callable[[bytes], None]] = []

    def is_pinned(self, block_id: bytes) -> bool:
        return block_id in self._ids

    def subscribe(self, listener: Callable[[bytes], None]) -> None:
        self._listeners.append(listener)

    def hold(self, block_id: bytes, *, on: bool) -> None:
        (self._ids.add if on else self._ids.discard)(block_id)
        for listener in self._listeners:
            listener(block_id)


class Replay:
    """One record's tiers. Feed it the events in order; `differs` holds the first difference."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.comparison = Comparison()
        self._page = int(header["page_size"])
        self._window: LookAhead[int] = LookAhead()
        self._held = _Held()
        policy: EvictionPolicy[BlockNode] = make_policy(
            header["eviction"], self._window, pinned=self._held
        )
        self._tier = _WatchedTier(BlockTree(FINGERPRINT), int(header["host_slots"]), policy)
        self._nodes: dict[int, BlockNode] = {}  # by slot
        self._blocks: dict[int, tuple[int | None, bytes, bytes]] = {}  # (before, tokens, identity)
        self._paths: dict[int, int] = {}  # last block of each request
        self._late: set[int] = set()  # passed over while they wait
        self._now = 0.0
        self._line = 0

    def feed(self, line: int, event: dict[str, Any]) -> None:
        """Replay one event, of the types that `Event` names. Raises one of NONSENSE for one that
        does not follow from those before."""
        self._line = line
        self._now += 1.0
        self._tier.gone.clear()
        getattr(self, f"_{event['op']}")(event)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the replayed tiers are sound: those of a server's record
        are."""
        self._tier.check_integrity()
        self._window.check_integrity()

    def _compare(self, what: str, recorded: object, replayed: object) -> None:
        if recorded != replayed and self.comparison.difference is None:
            self.comparison.difference = Difference(self._line, what, recorded, replayed)

    # Names

    def _root(self, event: dict[str, Any]) -> None:
        number = event["block"]
        self._define(number, (None, b"", root_id(FINGERPRINT, str(number))))

    def _block(self, event: dict[str, Any]) -> None:
        parent, tokens = event["parent"], block_tokens(event)
        above = b"" if parent is None else self._blocks[parent][2]
        self._define(event["block"], (parent, tokens, block_id(FINGERPRINT, above, tokens)))

    def _define(self, number: int, block: tuple[int | None, bytes, bytes]) -> None:
        if number in self._blocks:  # defined anew it could be above itself
            raise ValueError(f"block {number} comes twice")
        self._blocks[number] = block

    def _path(self, number: int) -> Prefix:
        """What ends in a block."""
        pieces: list[bytes] = []
        while True:
            before, tokens, _ = self._blocks[number]
            if before is None:
                return Prefix(str(number), b"".join(reversed(pieces)))
            pieces.append(tokens)
            number = before

    # Requests

    def _arrive(self, event: dict[str, Any]) -> None:
        self._paths[event["req"]] = event["path"]

    def _look(self, event: dict[str, Any]) -> None:
        needs = event["needs"]
        for request in needs:  # it may have come back with another prompt
            self._window.requests[int(request)].needs = None
        change = self._window.update(
            event["order"], len(event["order"]), lambda request: self._ids(needs[str(request)])
        )
        for request in change.departed:
            self._window.leave(request)

    def _discard(self, event: dict[str, Any]) -> None:
        self._window.leave(event["req"])

    def _passed(self, event: dict[str, Any]) -> None:
        self._late.add(event["req"])

    def _admit(self, event: dict[str, Any]) -> None:
        namespace, tokens = self._path(self._paths[event["req"]])
        looked_up = Prefix(namespace, tokens[: event["limit"] * TOKEN_BYTES])
        usable = self._tier.tree.match(looked_up).ready.tokens
        beyond = max(0, usable - event["device"]) // self._page * self._page
        self._compare("hit tokens of a request", event["hit"], beyond)
        found = self.comparison
        found.admissions += 1
        found.prompt_tokens += len(tokens) // TOKEN_BYTES
        found.device_tokens += event["device"]
        found.hit_tokens += beyond
        found.disk_tokens += min(beyond, event["disk"])
        if event["req"] in self._late:
            self._late.remove(event["req"])
            found.late_tokens += beyond

    def _gone(self, event: dict[str, Any]) -> None:
        self._paths.pop(event["req"], None)
        self._late.discard(event["req"])

    _finish = _gone

    # Slots

    def _stage(self, event: dict[str, Any]) -> None:
        slot = self._tier.stage(self._now, self._protected(event["spared"]))
        self._left(event["gone"])
        self._compare("slot given", event["slot"], slot)

    def _unstage(self, event: dict[str, Any]) -> None:
        self._tier.unstage(event["slot"])

    def _publish(self, event: dict[str, Any]) -> None:
        before, tokens, _ = self._blocks[event["block"]]
        if event["under"] < 0:
            parent = self._tier.tree.root(str(before))
        else:
            parent = self._nodes[event["under"]]
        outcome = self._tier.publish(parent, tokens, event["slot"], self._now)
        self._compare("block stored", event["created"], outcome.created)
        self._left(event["gone"])
        if outcome.created:
            self._nodes[event["slot"]] = outcome.node

    def _ready(self, event: dict[str, Any]) -> None:
        self._tier.mark_ready(self._nodes[event["slot"]])

    def _access(self, event: dict[str, Any]) -> None:
        self._tier.access(self._at(event["slots"]), self._now)

    def _pin(self, event: dict[str, Any]) -> None:
        self._tier.pin(self._at(event["slots"]))

    def _unpin(self, event: dict[str, Any]) -> None:
        self._tier.unpin(self._at(event["slots"]))

    def _hold(self, event: dict[str, Any]) -> None:
        self._held.hold(self._blocks[event["block"]][2], on=event["on"])

    def _evict(self, event: dict[str, Any]) -> None:
        self._tier.evict(event["count"], self._now, self._protected(event["spared"]))
        self._left(event["gone"])

    def _drop(self, event: dict[str, Any]) -> None:
        self._tier.drop(self._nodes[event["slot"]])

    def _clear(self, event: dict[str, Any]) -> None:
        self._tier.clear()

    def _lost(self, event: dict[str, Any]) -> None:
        self.comparison.lost_line = self._line

    def _end(self, event: dict[str, Any]) -> None:
        self.comparison.whole = True

    def _left(self, recorded: list[int]) -> None:
        self.comparison.evictions = self._tier.evicted_blocks
        self._compare("blocks that left, by slot", recorded, list(self._tier.gone))

    def _at(self, slots: Sequence[int]) -> list[BlockNode]:
        return [self._nodes[slot] for slot in slots]

    def _ids(self, numbers: Sequence[int]) -> list[bytes]:
        return [self._blocks[number][2] for number in numbers]

    def _protected(self, spared: Sequence[int]) -> IsProtected[BlockNode] | None:
        protected = set(spared)
        return (lambda node: node.slot in protected) if protected else None


def replay_record(path: Path) -> Comparison:
    """Replay a whole record up to its first difference or gap. Raises TraceError."""
    events = read_record(path)
    _, header = next(events)
    if header.get("eviction") not in POLICIES:
        raise TraceError(f"{path}: unknown eviction policy {header.get('eviction')!r}")
    with _refusing(f"{path}:1"):
        replay = Replay(header)
    comparison = replay.comparison
    for line, event in events:
        with _refusing(f"{path}:{line}"):
            replay.feed(line, event)
        comparison.lines = line
        if not comparison.equal:
            break
    else:
        with _refusing(f"{path}:{comparison.lines}"):
            replay.check_integrity()
    return comparison


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    try:
        yield
    except NONSENSE as error:
        raise TraceError(
            f"{where}: does not follow from the lines before ({repr(error)[:200]})"
        ) from error


def read_record(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, values), the header's (`Header`) first, then of events (`Event`); a last line
    that was cut off is left out. Raises TraceError, at the latest for the first line of what is no
    record of this version."""
    lines = _lines(path)
    number, first = next(lines, (1, "{}"))
    where = f"{path}:{number}"
    header = json_object(first, where)
    if header.get("trace") != "sglang-hc":
        raise TraceError(f"{path}: not a record of --hc-trace; `sglang-hc simulate` reads others")
    if header.get("version") != TRACE_VERSION:
        raise TraceError(
            f"{path}: version {header.get('version')}; this release reads version {TRACE_VERSION}"
        )
    yield number, {**json_value(first, Header, where)}
    for number, line in lines:
        yield number, {**json_value(line, Event, f"{path}:{number}")}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    return
                yield number, line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not a UTF-8 text file") from error
