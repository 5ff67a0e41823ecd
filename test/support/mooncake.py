"""Mooncake's real master, with its metadata server, and a node that holds blocks, on loopback."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import processes
from benchmark.harness.server import free_port
from support.served import ENV
from support.waiting import until

FOUND = importlib.util.find_spec("mooncake")
PROGRAMS = Path(((FOUND and FOUND.submodule_search_locations) or [""])[0])
needs_mooncake = pytest.mark.skipif(
    FOUND is None, reason="the package mooncake is not on the path; `make stores` puts it there"
)
PATH = {"PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], str(PROGRAMS.parent)])}
"""Environment of a server that finds the package."""

MASTER, NODE = "mooncake_master", "mooncake_client"

LEASE_MS = 500
"""What was read or looked up stays for so long."""

GONE_S = 3
"""A client that the master has not heard of for so long is gone, with what it holds."""


class Programs:
    """Those of the package that run; a context manager that ends them."""

    def __init__(self, folder: Path) -> None:
        """folder: for their logs."""
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            processes.end(process, 2.0)

    def run(self, program: str, port: int, *arguments: str) -> None:
        """Start a program; returns when its port answers."""
        log = self._folder / f"{program}.log"
        with open(log, "ab") as file:
            process = subprocess.Popen(
                processes.tied([str(PROGRAMS / program), *arguments]),
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        self._running[program] = process

        def listens() -> bool:
            assert process.poll() is None, f"{program}: {log.read_text()[-2000:]}"
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        until(listens, pause=0.1)

    def kill(self, program: str) -> None:
        process = self._running.pop(program)
        process.kill()
        process.wait()

    def pid(self, program: str) -> int:
        return self._running[program].pid


class Mooncake(Programs):
    """A store.

    node_mb: held by a node of its own, so that blocks outlive the servers; 0 for none. own_mb: that
    each server holds. limits: flags of the master besides.
    """

    def __init__(self, folder: Path, *limits: str, node_mb: int = 256, own_mb: int = 0) -> None:
        super().__init__(folder)
        self._limits, self._node_mb, self._own_mb = limits, node_mb, own_mb
        self._port, self._metadata, self._metrics = free_port(), free_port(), free_port()

    def __enter__(self) -> Mooncake:
        self.start_master()
        if self._node_mb:
            self.start_node()
        return self

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self._metadata}/metadata"

    def start_master(self) -> None:
        """Also again, where it was: it knows of nothing then."""
        self.run(
            MASTER, self._port,
            "--rpc_address=127.0.0.1", f"--rpc_port={self._port}",
            f"--metrics_port={self._metrics}", "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self._metadata}",
            f"--default_kv_lease_ttl={LEASE_MS}", f"--client_ttl={GONE_S}", *self._limits,
        )  # fmt: skip

    def start_node(self) -> None:
        port = free_port()
        self.run(
            NODE, port,
            "--host=127.0.0.1", f"--port={port}", f"--global_segment_size={self._node_mb} MB",
            f"--master_server_address={self.master}", f"--metadata_server={self.metadata}",
        )  # fmt: skip

    def flags(self, **options: Any) -> tuple[str, ...]:
        """Of a server. options: of `--hc-remote-config` besides, or instead."""
        options = {
            "master_server_address": self.master,
            "metadata_server": self.metadata,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": self._own_mb << 20,
            **options,
        }
        return "--hc-remote", "mooncake", "--hc-remote-config", json.dumps(options)
