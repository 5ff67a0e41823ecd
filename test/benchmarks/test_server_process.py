"""The server's life cycle, with a small server of our own as the module."""

from __future__ import annotations

import os
import socket
import urllib.request
from pathlib import Path

import pytest

from benchmark.harness.server import ServerFailed, ServerProcess, free_port
from support.waiting import is_over, until

SERVER = """
import argparse, http.server, os, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--host"); parser.add_argument("--port", type=int)
parser.add_argument("--children", default=""); parser.add_argument("--die", action="store_true")
parser.add_argument("--hang", action="store_true")
args = parser.parse_args()
print("word from the server", os.environ.get("FAKE_WORD"), flush=True)
if args.die:
    sys.exit("refused: the fake wants to die")
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
wait = [sys.executable, "-c", deaf]
if args.children:
    ids = [subprocess.Popen(wait).pid, subprocess.Popen(wait, start_new_session=True).pid]
    open(args.children, "w").write(" ".join(map(str, ids)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
try:
    server = http.server.HTTPServer((args.host, args.port), Handler)
except OSError as error:
    print("address already in use" if error.errno == 98 else error, flush=True)
    time.sleep(600 if args.hang else 0)
    raise
server.serve_forever()
"""


@pytest.fixture
def module(tmp_path: Path) -> dict[str, str]:
    """Environment in which `python -m fake_launch` works."""
    (tmp_path / "fake_launch.py").write_text(SERVER)
    return {"PYTHONPATH": str(tmp_path), "FAKE_WORD": "heard"}


def test_it_serves_on_localhost_and_leaves_nothing_behind(
    tmp_path: Path, module: dict[str, str]
) -> None:
    children = tmp_path / "children"
    log = tmp_path / "log"
    with ServerProcess("fake_launch", ["--children", str(children)], module, log) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
        assert os.getpgid(server.pid) == server.pid
        pids = [server.pid, *map(int, children.read_text().split())]
        assert not any(map(is_over, pids))
        assert server.start_s > 0
    # One child ignores SIGTERM, the other one left the process group as well.
    until(lambda: all(map(is_over, pids)))
    assert "word from the server heard" in log.read_text()
    server.kill()


def test_the_body_may_raise(module: dict[str, str]) -> None:
    with pytest.raises(KeyError), ServerProcess("fake_launch", [], module) as server:
        pid = server.pid
        raise KeyError
    assert is_over(pid)


def test_a_server_that_ends_shows_its_log(tmp_path: Path, module: dict[str, str]) -> None:
    server = ServerProcess("fake_launch", ["--die"], module, tmp_path / "log")
    with pytest.raises(ServerFailed, match="the fake wants to die"):
        server.start()


def test_a_server_that_is_never_healthy_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text("import time; time.sleep(600)")
    server = ServerProcess("never", [], {"PYTHONPATH": str(tmp_path)}, timeout_s=0.5)
    with pytest.raises(ServerFailed, match="not healthy"):
        server.start()
    with pytest.raises(ServerFailed, match="not started"):
        _ = server.pid


def test_a_port_lost_while_starting_is_replaced(
    tmp_path: Path, module: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start once lost its port to another process, and the launcher hung on for minutes."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    ports = iter([taken.getsockname()[1], free_port()])
    monkeypatch.setattr("benchmark.harness.server.free_port", lambda: next(ports))
    with taken, ServerProcess("fake_launch", ["--hang"], module, tmp_path / "log") as server:
        assert server.port != taken.getsockname()[1]
        assert urllib.request.urlopen(f"{server.url}/health").status == 200
    assert "address already in use" in (tmp_path / "log").read_text()
