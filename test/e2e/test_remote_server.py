"""Two real servers, one after the other, that share a remote store."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.prompts import in_directory, prompt
from support.served import first_turn, generate, start

pytestmark = pytest.mark.server

PROMPT = prompt(9, 300)


def test_a_conversation_moves_to_another_host(models: None, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    remote = in_directory(shared)
    with start(tmp_path / "log", *remote) as server:
        saved = first_turn(server, PROMPT, "remote_saved_blocks")
        other = generate(server, PROMPT[::-1], 16)[0]
    with start(tmp_path / "log2", *remote) as server:
        assert generate(server, saved.history, 16) == saved.answer
        shutil.rmtree(shared)
        assert generate(server, PROMPT[::-1], 16) == (other, 0), "the store is gone, not the server"
