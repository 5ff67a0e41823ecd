"""The benchmark of the capacity cliff on a server with tiers, past its pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmark.__main__ import main
from support.core import MODELS

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_past_the_pool_histories_come_back_from_host_memory(models: None, tmp_path: Path) -> None:
    """Six conversations of 150 tokens fit: with four nothing leaves the pool, with sixteen most."""
    words = ["--model", str(MODELS / "llama-mha"), "--arms", "kv", "--max-total-tokens", "1024"]
    words += ["--system-len", "100", "--turns", "3", "--input-len", "16", "--output-len", "8"]
    words += ["--window", "3", "--past", "2", "--repeat", "1", "--warmup", "1"]
    words += ["--host-size-gb", "0.3", "--server-args=--dtype float32", "--output", str(tmp_path)]
    assert main(["cliff", *words]) == 0
    runs = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [run["value"] for run in runs] == [1, 2, 4, 8, 16]
    few, many = (run["summary"] for run in (runs[2], runs[-1]))
    assert few["hits"]["device"] > few["hits"]["host"]
    assert many["hits"]["host"] > many["hits"]["device"]
    assert many["total_requests"] > 16 and not many["failed"]
