"""Dynamo's selection service (package `ai-dynamo-runtime`) as the router of a server's replicas."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from benchmark.harness import processes
from benchmark.harness.server import free_port
from support.kv_events import Ports
from support.waiting import HANGS_S, until

PYTHON = Path(os.environ.get("HC_ROUTER_PYTHON", ".router/bin/python"))
"""Of an environment that has the package: `make router` makes it."""


def needs_router() -> None:
    """Skip a test where the package is not installed."""
    if not PYTHON.exists():
        pytest.skip(f"no ai-dynamo-runtime: {PYTHON} is missing; `make router` installs it")


class Router:
    """A process that reads events and says which replica a prompt should go to. Replicas are
    registered in groups: each sees events of its own, of the same replicas."""

    def __init__(self, log: Path) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        words = [str(PYTHON), "-m", "dynamo.select_service", "--port", self._url.rpartition(":")[2]]
        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                processes.tied(words), stdout=file, stderr=file, start_new_session=True
            )
        until(self._is_up, pause=0.05)

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        processes.end(self._process, 2.0)

    def register(
        self, group: str, replica: int, events: str, replays: str | None, page: int, rank: int = 0
    ) -> None:
        """events, replays: addresses of the replica's publisher. rank: the replica's number in its
        server, which its events carry."""
        worker = {
            "worker_id": self._number(group, replica), "routing_group": group, "block_size": page,
            "endpoint": f"http://127.0.0.1:{replica + 1}",
            "data_parallel_start_rank": rank, "data_parallel_size": 1,
            "kv_events_endpoint": events, "replay_endpoint": replays,
        }  # fmt: skip
        assert self._call("/workers", worker)["lifecycle"] == "schedulable"

    def choose(self, group: str, tokens: list[int]) -> int:
        """The replica that a prompt should go to."""
        chosen: int = self._call("/select", self._question(group, tokens))["worker_id"]
        return chosen % 10

    def known(self, group: str, tokens: list[int]) -> dict[int, dict[str, int]]:
        """How many blocks of a prompt each replica is known to have, by tier."""
        answer = self._call("/overlap_scores", self._question(group, tokens))
        return {one["worker_id"] % 10: one for one in answer["workers"]}

    def _number(self, group: str, replica: int) -> int:
        return 10 * (1 + sum(group.encode())) + replica

    def _question(self, group: str, tokens: list[int]) -> dict[str, Any]:
        return {"model_name": "default", "routing_group": group, "token_ids": tokens}

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=HANGS_S) as reply:
            return json.loads(reply.read())

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "the router ended"
        with suppress(urllib.error.URLError, ConnectionError):
            return bool(self._call("/health")["status"] == "ok")
        return False


class DeviceOnly(threading.Thread):
    """Passes on what a server says of its device, as SGLang without sglang-hc does."""

    def __init__(self, ports: Ports, replica: int) -> None:
        super().__init__(daemon=True)
        context, port = zmq.Context.instance(), free_port()
        self.address = f"tcp://127.0.0.1:{port}"
        self._from, self._to = context.socket(zmq.SUB), context.socket(zmq.PUB)
        self._from.connect(ports.address(replica))
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._to.bind(self.address)
        self.start()

    def run(self) -> None:
        number = 0
        while True:
            _, _, payload = self._from.recv_multipart()
            when, events, rank = msgspec.msgpack.decode(payload)
            kept = [one for one in events if one.get("medium", "GPU") == "GPU"]
            if kept:
                batch = msgspec.msgpack.encode([when, kept, rank])
                self._to.send_multipart([b"", number.to_bytes(8, "big"), batch])
                number += 1
