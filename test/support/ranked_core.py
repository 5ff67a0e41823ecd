"""SGLang's real scheduler on several ranks: a process each, one body of a test in all of them.

All processes make the same calls on their own core. Requests are handed in on the first rank only
and reach the other as SGLang sends them; the first rank also says when nothing is left to do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from benchmark.harness.server import free_port
from sglang_hc.ranks.agreement import REPORT_S
from support.core import Core, Idle, run_in_children

ENV = {
    "SGLANG_NCCL_SO_PATH": "/nonexistent",  # else SGLang asks for CUDA
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling one small function would take half a minute
}


class Stop:
    """Travels with the requests: all ranks leave their event loops."""


class Inbox:
    """In place of a socket."""

    def __init__(self) -> None:
        self.waiting: deque[Any] = deque()


class RankedCore(Core):
    """The core of one of two tensor-parallel ranks. `submit`, `ask`, `run` and the rest are to be
    called on all ranks alike."""

    sizes: ClassVar[dict[str, int]] = {"--tp-size": 2}
    env: ClassVar[dict[str, str]] = ENV

    def __init__(self, rank: int, port: int, *flags: str, **options: Any) -> None:
        self.rank = rank
        self._take_place(rank)
        import torch._dynamo

        torch._dynamo.config.disable = True
        sizes = (part for name, size in self.sizes.items() for part in (name, str(size)))
        ranks = (*sizes, "--nccl-port", str(port))
        super().__init__(*ranks, *flags, **{**self.env, **options})

    def _take_place(self, rank: int) -> None:
        self.tp_rank = rank

    def _connect(self) -> None:
        import dataclasses

        from sglang.srt.managers.scheduler_components import request_receiver
        from sglang.utils import TypeBasedDispatcher

        request_receiver.sock_recv = _take
        self._inbox = Inbox()
        self._receiver = dataclasses.replace(
            self.scheduler.request_receiver,
            recv_from_tokenizer=self._inbox,
            recv_from_rpc=Inbox(),
        )
        super()._connect()
        self.scheduler._request_dispatcher += TypeBasedDispatcher([(Stop, _leave)])

    def receive(self) -> list[Any]:
        if self.rank == 0:
            try:
                self._inbox.waiting.extend(super().receive())
            except Idle:
                self._inbox.waiting.append(Stop())
        else:
            self.passes += 1
            self.inbox.clear()
        received: list[Any] = self._receiver.recv_requests()
        return received

    def shown(self) -> dict[str, Any]:
        """The tiers' part of /server_info, asked as over HTTP, when each rank has shown what it
        counted: all ranks get the request in one pass, and only the first one answers."""
        from sglang.srt.managers.io_struct import GetInternalStateReq

        time.sleep(REPORT_S)
        self.run()
        answers: list[Any] = []
        channel = self.scheduler.ipc_channels.send_to_tokenizer
        channel.send_output = lambda out, _: answers.append(out)
        self.inbox.append(GetInternalStateReq())
        self.run()
        (answer,) = answers
        part: dict[str, Any] = answer.internal_state["hc"]
        return part


class StagedCore(RankedCore):
    """The core of one of two stages of a pipeline. Between two calls of `run` nothing is under way:
    so `run` is not to be told a number of iterations."""

    sizes: ClassVar[dict[str, int]] = {"--pp-size": 2}

    def _take_place(self, rank: int) -> None:
        self.pp_rank = rank

    def receive(self) -> list[Any]:
        received = super().receive()
        if self.rank == 0 and any(isinstance(one, Stop) for one in received):
            # Behind the end of its loop the scheduler sends nothing, and waits for nothing sent.
            if self.tree_is_ours:
                sent = self._receiver.next_stage.sent
            else:
                sent = self.scheduler._pp_send_pyobj_to_next_stage(received, async_send=True)
            for part in sent:
                part.work.wait()
            sent.clear()
        return received

    @property
    def tree_is_ours(self) -> bool:
        return hasattr(self.tree, "tiers")


class GridCore(StagedCore):
    """The core of one of four ranks: two stages of two tensor-parallel ranks each."""

    sizes: ClassVar[dict[str, int]] = {"--tp-size": 2, "--pp-size": 2}

    def _take_place(self, rank: int) -> None:
        self.pp_rank, self.tp_rank = divmod(rank, 2)


CORES = {"tp": RankedCore, "pp": StagedCore}
"""By the name that folders and traces of such ranks have."""

KINDS = {**CORES, "grid": GridCore}


def _take(inbox: Inbox, _flags: int) -> Any:
    import zmq

    if not inbox.waiting:
        raise zmq.ZMQError
    return inbox.waiting.popleft()


def _leave(_stop: Stop) -> None:
    raise Idle


def run_ranks(body: Callable[..., Any], *args: Any, ranks: int = 2) -> list[Any]:
    """Call `body(rank, port, *args)` in as many forked processes; returns what they return. port:
    for `RankedCore`. Raises what the first of them raises that fails. Ranks that hang run into the
    limit of their test."""
    port = free_port()
    return run_in_children([partial(body, rank, port, *args) for rank in range(ranks)])
