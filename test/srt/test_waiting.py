"""The window sees the scheduler's queue as it is, whatever the scheduler has done with it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.srt.waiting import WaitingRequests
from support.host import host_queue

steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from(["matched", "unmatched"])),
        st.tuples(st.just("admit"), st.lists(st.integers(0, 9), max_size=3)),
        st.tuples(st.sampled_from(["abort", "to_the_head", "finish"]), st.integers(0, 9)),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=40,
)


class Server:
    """A scheduler's queue, running requests, and what it tells the tree of both."""

    def __init__(self) -> None:
        window, _, _, view = host_queue(64, eviction="lru")
        view.finished("before", 1)  # one block per request: the window holds them all
        self.waiting = WaitingRequests(view, None, on_device=lambda key: 0)
        self.window = window
        self.waiting_queue: list[Any] = []
        self.running: list[Any] = []
        self.known: set[str] = set()
        self.count = 0

    def arrive(self, how: str) -> None:
        req = SimpleNamespace(
            rid=f"r{self.count}",
            full_untruncated_fill_ids=array("q", [1]),
            extra_key=None,
            sampling_params=SimpleNamespace(custom_params=None),
        )
        self.count += 1
        if how == "matched":
            self.waiting.matched(req)
            self.known.add(req.rid)
        self.waiting.queued(req.rid)
        self.waiting_queue.append(req)

    def admit(self, places: list[int]) -> None:
        """A pass, as SGLang makes it: the queue is another list afterwards."""
        self.look(None)
        gone = [req for at, req in enumerate(self.waiting_queue) if at in places]
        for req in gone:
            assert self.waiting.ready(req.rid)
        self.waiting_queue = [req for req in self.waiting_queue if req not in gone]
        self.running += gone

    def abort(self, at: int) -> None:
        if at < len(self.waiting_queue):
            req = self.waiting_queue.pop(at)
            self.waiting.left(req.rid)

    def to_the_head(self, at: int) -> None:
        if at < len(self.waiting_queue):
            self.waiting_queue.insert(0, self.waiting_queue.pop(at))

    def finish(self, at: int) -> None:
        if at < len(self.running):
            self.waiting.finished(self.running.pop(at).rid, 1)

    def look(self, _: None) -> None:
        self.waiting.on_schedule_step(self.waiting_queue, 0)
        self.window.check_integrity()
        names = [req.rid for req in self.waiting_queue if req.rid in self.known]
        assert list(self.window.order) == names
        assert set(self.window.requests) == set(names), "a record lives as long as its wait"


@given(steps)
def test_the_window_follows_the_queue(script: list[tuple[str, Any]]) -> None:
    server = Server()
    for step, argument in script:
        getattr(server, step)(argument)
    server.look(None)


def test_a_name_that_two_requests_share_does_no_harm() -> None:
    """A client that went away may use its request id again while the first still runs."""
    server = Server()
    server.arrive("matched")
    server.look(None)
    server.admit([0])
    server.count = 0
    server.arrive("matched")
    server.look(None)
    server.arrive("matched")
    server.look(None)
    server.finish(0)  # the first r0; the second is waiting
    server.known.discard("r0")
    server.look(None)
