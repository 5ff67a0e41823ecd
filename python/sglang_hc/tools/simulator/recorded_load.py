"""The load of a server's run (`--hc-trace`) as a workload: its requests at their times.

Unlike `recorded.replay_record`, which makes the run itself again, this is for other tiers and other
policies: what would have been hit with twice the memory?
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from sglang_hc.tools.simulator.record_lines import block_tokens
from sglang_hc.tools.simulator.workloads import Session, Span, Turn
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.identity import TOKEN_BYTES


class _Paths:
    """Spans of the record's paths: equal prefixes get equal spans, the rest is fresh.

    A path is asked for by the number of its last block. Along a path fresh spans follow each other.
    """

    def __init__(self, fresh: Callable[[int], Span]) -> None:
        self._fresh = fresh
        self._blocks: dict[int, tuple[int | None, bytes]] = {}
        self._spans: dict[int, list[Span]] = {}
        self._known: dict[int, list[tuple[bytes, int]]] = {}  # below each block, by tokens

    def define(self, number: int, parent: int | None, tokens: bytes) -> None:
        if number in self._blocks:  # defined anew it could be above itself
            raise ValueError(f"block {number} comes twice")
        if parent is not None and parent not in self._blocks:
            raise KeyError(parent)
        self._blocks[number] = (parent, tokens)

    def spans(self, number: int) -> list[Span]:
        path = []
        step: int | None = number
        while step is not None:
            path.append(step)
            step = self._blocks[step][0]
        found: list[Span] = []
        for block in reversed(path):
            if block not in self._spans:
                self._spans[block] = self._first_met(block)
            found += self._spans[block]
        return _joined(found)

    def _first_met(self, number: int) -> list[Span]:
        """Spans of one block: the rows it shares with one met before, and fresh ones."""
        parent, tokens = self._blocks[number]
        if parent is None:
            return []
        known = self._known.setdefault(parent, [])
        place = bisect_left(known, (tokens, number))
        shared, twin = max(
            (
                (common_tokens(other, tokens), n)
                for other, n in known[max(place - 1, 0) : place + 1]
            ),
            default=(0, 0),
        )
        known.insert(place, (tokens, number))
        spans = _leading(self._spans[twin], shared) if shared else []
        rest = len(tokens) // TOKEN_BYTES - shared
        return [*spans, self._fresh(rest)] if rest else spans


def recorded_sessions(
    events: Iterable[dict[str, Any]], fresh: Callable[[int], Span]
) -> list[Session]:
    """One session of one turn per request that was queued; retracted ones count once.

    An answer is what a finished request has beyond its prompt. Raises KeyError or ValueError for a
    record that makes no sense.
    """
    paths = _Paths(fresh)
    arrived: dict[int, tuple[float, tuple[Span, ...], int]] = {}
    sessions: list[Session] = []
    for event in events:
        op = event.get("op")
        if op == "root":
            paths.define(event["block"], None, b"")
        elif op == "block":
            paths.define(event["block"], event["parent"], block_tokens(event))
        elif op == "arrive" and event["req"] not in arrived:
            spans = paths.spans(event["path"])
            if spans:
                arrived[event["req"]] = (event["t"], tuple(spans), _length(spans))
        elif op in ("finish", "gone") and event["req"] in arrived:
            at, prompt, length = arrived.pop(event["req"])
            answer = Span(0, 0)
            if op == "finish":
                behind = _behind(paths.spans(event["path"]), length)
                if behind:
                    answer = Span(behind[0].start, _length(behind))
            sessions.append(Session(at, (Turn(prompt, answer),), whole=True))
    return sorted(sessions, key=lambda session: session.arrival)


def _length(spans: Iterable[Span]) -> int:
    return sum(span.length for span in spans)


def _leading(spans: Iterable[Span], count: int) -> list[Span]:
    out = []
    for span in spans:
        if count <= 0:
            break
        out.append(Span(span.start, min(span.length, count)))
        count -= span.length
    return out


def _behind(spans: Iterable[Span], count: int) -> list[Span]:
    out = []
    for span in spans:
        skipped = min(count, span.length)
        count -= skipped
        if skipped < span.length:
            out.append(Span(span.start + skipped, span.length - skipped))
    return out


def _joined(spans: Iterable[Span]) -> list[Span]:
    out: list[Span] = []
    for span in spans:
        if out and out[-1].start + out[-1].length == span.start:
            out[-1] = Span(out[-1].start, out[-1].length + span.length)
        else:
            out.append(span)
    return out
