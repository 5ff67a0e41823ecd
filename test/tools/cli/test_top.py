"""`sglang-hc top` on recorded answers of a server, and on answers that no server should give."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tools.cli.main import main
from sglang_hc.tools.cli.top import view
from sglang_hc.tools.scrape import SOURCES, UNREADABLE, Reading, from_server_info, scrape
from support.json_values import json_values

RECORDED = Path(__file__).parent / "recorded"
INFO = (RECORDED / "server_info.json").read_text()
METRICS = (RECORDED / "metrics").read_text()
TOKENS = {"device": 0, "host": 1794, "disk": 1536, "remote": 0, "computed": 270, "aborted": 0}


@contextmanager
def answering(info: str = INFO, metrics: str | None = METRICS, key: str | None = None) -> Any:
    """The URL of something that gives these answers to who has the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = {"/server_info": info, "/metrics": metrics}.get(self.path)
            allowed = key is None or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(401 if not allowed else 404 if text is None else 200)
            self.end_headers()
            if allowed and text is not None:
                self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def nobody() -> Iterator[str]:
    """A URL where nobody answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and never listens
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


Captured = pytest.CaptureFixture[str]


def test_a_fleet_is_a_table_in_which_a_dead_server_is_a_row(nobody: str, capsys: Captured) -> None:
    with answering() as one, answering(metrics=None) as other:
        assert main(["top", "--once", one, other, nobody]) == 1
    titles, *rows = capsys.readouterr().out.splitlines()
    first, second, note, dead = rows[:4]
    assert titles.split()[:4] == ["server", "run/queue", "device", "host"]
    assert first.split()[1:] == [
        *("0/0", "0%", "31/409", "24", "-"),
        *("0%", "50%", "43%", "0%", "8%", "0", "0"),
    ]
    assert second.split()[1] == "-" and "--enable-metrics" in note
    assert "does not answer" in dead and nobody.removeprefix("http://") in dead
    assert "\x1b" not in "".join(rows), "only a terminal is cleared"
    assert any("load 24" in row for row in rows) and any("as_stored 24" in row for row in rows)
    slowest = [row for row in rows if " ms " in row]
    assert len(slowest) == 5
    took = [float(row.split()[0]) for row in slowest]
    assert took == sorted(took, reverse=True)


def test_json_has_what_the_server_said(nobody: str, capsys: Captured) -> None:
    with answering() as url:
        assert main(["top", "--once", "--json", url]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        (found,) = json.loads(line)["servers"]
        assert found["url"] == url and found["error"] is None and found["note"] is None
        assert (found["model"], found["layer_plan"]) == ("llama-mha", "kv:4")
        assert (found["running"], found["queued"], found["device_usage"]) == (0, 0, 0.0)
        assert found["prompt_tokens"] == TOKENS and found["decisions"] == {"load": 12}
        assert found["numbers"]["disk_blocks"] == 24
        assert found["slowest"][0]["reasons"] == {"as_stored": 1}
        assert main(["top", "--once", "--json", url, nobody]) == 1
    _, dead = json.loads(capsys.readouterr().out)["servers"]
    assert set(dead) == {"url", "error"} and dead["error"]


def test_a_key_opens_a_server_that_has_one(tmp_path: Path, capsys: Captured) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with answering(key="secret") as url:
        assert scrape(url).error == "status 401"
        assert main(["top", "--once", "--api-key-file", str(key), url]) == 0
    assert main(["top", "--once", "--api-key-file", str(tmp_path / "none"), url]) == 2
    assert "--api-key-file" in capsys.readouterr().err


def test_it_looks_again_until_it_is_interrupted(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([None, None])

    def wait(seconds: float) -> None:
        assert seconds == 0.5
        if next(waits, "over"):
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", wait)
    with answering() as url:
        assert main(["top", "--json", "--interval", "0.5", url]) == 130
    looks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(looks) == 3 and all(look["servers"][0]["url"] == url for look in looks)


@pytest.mark.parametrize("words", [["localhost:3"], ["http://h", "--interval", "0"]])
def test_wrong_usage_is_one_sentence(words: list[str], capsys: Captured) -> None:
    assert main(["top", "--once", *words]) == 2
    assert capsys.readouterr().err.startswith("sglang-hc top: ")


def test_replicas_are_added() -> None:
    info = json.loads(INFO)
    once = from_server_info("http://h", info)
    info["internal_states"] *= 3
    found = from_server_info("http://h", info)
    assert found.replicas == 3
    assert found.prompt_tokens == {source: 3 * count for source, count in TOKENS.items()}
    assert found.numbers == {name: 3 * value for name, value in once.numbers.items()}


def test_a_server_without_the_tiers_says_so() -> None:
    info = json.loads(INFO)
    del info["internal_states"][0]["hc"]
    with answering(json.dumps(info)) as url:
        reading = scrape(url)
    assert reading.note == "runs without the tiers" and reading.running == 0
    assert len(view([reading], {})) == 3


def test_a_server_that_streams_state_says_so() -> None:
    info = json.loads(INFO)
    info["internal_states"][0]["hc"] = {"throughput": {"tokens": 640}}
    with answering(json.dumps(info)) as url:
        reading = scrape(url)
    assert reading.note is not None and reading.note.endswith("in host memory, and no tiers")
    assert len(view([reading], {})) == 3


@pytest.mark.parametrize("info", ["", "<html>", "[]", '{"internal_states": 3}', "null"])
def test_another_program_is_a_row_too(info: str) -> None:
    with answering(info) as url:
        reading = scrape(url)
    assert reading.error and "does not answer" in view([reading], {})[1]


def test_a_page_that_is_not_of_prometheus_is_said_and_the_rest_is_shown() -> None:
    with answering(metrics="sglang:num_running_reqs{ 3") as url:
        reading = scrape(url)
    assert reading.error is None and reading.note is not None and "/metrics" in reading.note


def test_shares_are_of_what_came_since_the_last_look() -> None:
    before = from_server_info("http://h", json.loads(INFO))
    now = from_server_info("http://h", json.loads(INFO))
    now.prompt_tokens["remote"] += 300
    now.prompt_tokens["computed"] += 100
    assert view([now], {"http://h": before})[1].split()[6:11] == ["0%", "0%", "0%", "75%", "25%"]
    # Nothing came, or the server was started again.
    assert view([now], {"http://h": now})[1].split()[6:11] == view([now], {})[1].split()[6:11]
    assert view([before], {"http://h": now})[1].split()[6:11] == view([before], {})[1].split()[6:11]


NAMES = st.sampled_from(
    [
        *("internal_states", "hc", "layer_plan", "slowest_restorations", "seconds", "reasons"),
        *(f"prompt_tokens_{source}" for source in SOURCES),
        *("host_slots", "remote_usable", "tokens", "model_path"),
        *("restore_decision_\x1b[2J", "restore_reason_x"),
    ]
)


@given(json_values(NAMES), json_values(NAMES))
def test_whatever_is_answered_nothing_breaks_or_moves_the_cursor(state: Any, slow: Any) -> None:
    hc = {"slowest_restorations": slow, "host_slots": 3}
    hc |= state if isinstance(state, dict) else {"prompt_tokens_disk": 2}
    for info in (state, {"internal_states": [{"hc": state}]}, {"internal_states": [{"hc": hc}]}):
        reading = read(lambda info=info: from_server_info("http://h", info))
        lines = view([reading], {"http://h": reading})
        assert all("\x1b" not in line for line in lines)
        json.dumps(reading.to_dict())


def read(ask: Callable[[], Reading]) -> Reading:
    try:
        return ask()
    except UNREADABLE as error:
        return Reading("http://h", error=str(error))
