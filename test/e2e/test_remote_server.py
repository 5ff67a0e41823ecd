"""Two real servers, one after the other, that share a remote store."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from support.served import generate, numbers, start, wait_for

pytestmark = pytest.mark.server

PROMPT = random.Random(9).choices(range(3, 900), k=300)


def test_a_conversation_moves_to_another_host(models: None, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    remote = ("--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": str(shared)}))
    with start(tmp_path / "log", *remote) as server:
        history = PROMPT + generate(server, PROMPT, 40)[0]
        blocks = len(history) // 64
        wait_for(lambda: numbers(server).get("remote_saved_blocks", 0) >= blocks)
        wanted, stored = generate(server, history, 16)
        assert stored == 0, "it was never forgotten"
        other = generate(server, PROMPT[::-1], 16)[0]
    with start(tmp_path / "log2", *remote) as server:
        assert generate(server, history, 16) == (wanted, blocks * 64)
        shutil.rmtree(shared)
        assert generate(server, PROMPT[::-1], 16) == (other, 0), "the store is gone, not the server"
