"""A Prometheus scrapes a server under a load, and every query of the dashboard returns series."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.dashboards import DEPLOY, queries, rules
from support.prompts import in_directory, on_disk, prompt
from support.served import ask, start
from support.waiting import until

PROMETHEUS = shutil.which("prometheus")

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed"),
]


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """The URL of one with the configuration of `deploy/` that scrapes `target` each second."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    folder.mkdir()
    shutil.copy(DEPLOY / "prometheus" / "alerts.yaml", folder)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    words = [str(PROMETHEUS), f"--config.file={folder / 'prometheus.yaml'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log, subprocess.Popen(words, stdout=log, stderr=log) as own:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            own.terminate()


def answer(url: str, path: str, **parameters: str) -> Any:
    try:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=10) as reply:
            return json.loads(reply.read())["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters}: {error.read().decode()}") from None
    except OSError:
        return None  # it is starting


def test_every_query_of_the_dashboard_returns_series(models: None, tmp_path: Path) -> None:
    below = (*on_disk(tmp_path / "own"), *in_directory(tmp_path / "shared"))
    with start(tmp_path / "log", *below, "--enable-metrics") as server:
        target = server.url.removeprefix("http://")
        with prometheus(tmp_path / "prometheus", target) as url:
            up = f'up{{instance="{target}"}} == 1'
            until(lambda: (answer(url, "query", query=up) or {}).get("result"), pause=0.5)
            left = dict.fromkeys(queries())

            def missing() -> list[str]:
                for seed in range(8):  # more than the device holds
                    ask(server, prompt(seed, 250), 4)
                for query in list(left):
                    if answer(url, "query", query=query)["result"]:
                        del left[query]
                return list(left)

            until(lambda: not missing(), pause=1, show=lambda: list(left))
            loaded = answer(url, "rules")["groups"][0]["rules"]
            assert [one["name"] for one in loaded] == [one["alert"] for one in rules()]
            assert {one["health"] for one in loaded} == {"ok"}
            fired = [one["labels"]["alertname"] for one in answer(url, "alerts")["alerts"]]
            assert set(fired) <= {"HcCostsAreOff"}, "costs of this test are not those of a machine"
