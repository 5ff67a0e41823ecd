"""The window sees the scheduler's queue as it is, whatever the scheduler has done with it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

from sglang_hc.queue.requests import Serial
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.requests.scheduler_queue import SchedulerQueue
from support.host import host_queue

RIDS = 3
"""Names that clients use; several requests have each."""

steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.sampled_from(["matched", "unmatched", "outside", "image"])),
        st.tuples(st.just("admit"), st.lists(st.integers(0, 9), max_size=3)),
        st.tuples(st.sampled_from(["abort", "to_the_head"]), st.integers(0, 9)),
        st.tuples(st.sampled_from(["finish", "retract"]), st.integers(0, 9)),
        st.tuples(st.just("look"), st.none()),
    ),
    max_size=40,
)


class Request(SimpleNamespace):
    """Equal to nothing but itself, like SGLang's."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Server:
    """A scheduler's queue, running requests, and what it tells the tree of both."""

    def __init__(self) -> None:
        window, _, _, view = host_queue(64, eviction="lru")
        view.finished("before", 1)  # one block per request: the window holds them all
        self.waiting = SchedulerQueue(view, lambda key: 0)
        self.window = window
        self.waiting_queue: list[Any] = []
        self.running: list[Any] = []
        self.known: set[Serial] = set()
        self.count = 0

    def arrive(self, how: str) -> None:
        req = Request(
            rid=f"r{self.count % RIDS}",
            cache_request_handle=CacheRequestHandle(f"r{self.count % RIDS}", 0),
            kv=ReqKvInfo(),
            full_untruncated_fill_ids=array("q", [1]),
            extra_key=None,
            skip_radix_cache_insert=how == "outside",
            multimodal_inputs=object() if how == "image" else None,
            sampling_params=SimpleNamespace(custom_params=None),
            finished=lambda: False,
            to_finish=None,
        )
        self.count += 1
        if how != "unmatched":
            self.waiting.matched(req)
        if how == "matched":
            self.known.add(serial_of(req))
        self.waiting.queued(req.cache_request_handle)
        self.waiting_queue.append(req)

    def admit(self, places: list[int]) -> None:
        """A pass, as SGLang makes it: the queue is another list afterwards."""
        self.look(None)
        self.waiting.arrange(self.waiting_queue)
        stay = []
        for at, req in enumerate(self.waiting_queue):
            if at in places or not at % 2:  # SGLang passes over some without asking
                assert self.waiting.ready(req.cache_request_handle)
                assert self.waiting.last_asked is req
            (self.running if at in places else stay).append(req)
            req.kv.req_pool_idx = 0 if at in places else None
        self.waiting_queue = stay

    def abort(self, at: int) -> None:
        if at < len(self.waiting_queue):
            self.waiting_queue.pop(at)

    def to_the_head(self, at: int) -> None:
        if at < len(self.waiting_queue):
            self.waiting_queue.insert(0, self.waiting_queue.pop(at))

    def finish(self, at: int, *, is_over: bool = True) -> None:
        if at < len(self.running):
            req = self.running.pop(at)
            req.finished = lambda: is_over
            self.waiting.finished(req, 1)
            req.kv.req_pool_idx = None

    def retract(self, at: int) -> None:
        if at < len(self.running):
            req = self.running[at]
            self.finish(at, is_over=False)
            self.waiting.matched(req)
            if not req.skip_radix_cache_insert:
                self.known.add(serial_of(req))
            self.waiting.queued(req.cache_request_handle)
            self.waiting_queue.append(req)

    def look(self, _: None) -> None:
        self.waiting.on_schedule_step(self.waiting_queue, 0)
        self.window.check_integrity()
        names = [serial_of(req) for req in self.waiting_queue if serial_of(req) in self.known]
        assert list(self.window.order) == names
        assert set(self.window.requests) == set(names), "a record lives as long as its wait"


@given(steps)
@example([("arrive", "matched"), ("admit", [0]), ("retract", 0)])
@example([("arrive", "matched"), ("abort", 0)])
def test_the_window_follows_the_queue(script: list[tuple[str, Any]]) -> None:
    server = Server()
    for step, argument in script:
        getattr(server, step)(argument)
    server.look(None)


@pytest.mark.parametrize(
    ("is_over", "why", "comes_back"),
    [(True, None, False), (False, None, True), (False, "OOM", False)],
)
def test_who_is_retracted_to_be_aborted_does_not_come_back(
    is_over: bool, why: str | None, comes_back: bool
) -> None:
    """SGLang aborts the last request that does not fit without queueing it again: nothing of it
    may be waited for."""
    server, told = Server(), []
    server.arrive("matched")
    server.admit([0])
    (req,) = server.running
    req.to_finish = why
    server.waiting._view.finished = lambda *_, comes_back: told.append(comes_back)
    server.finish(0, is_over=is_over)
    assert told == [comes_back]
