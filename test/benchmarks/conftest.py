"""A fixture that starts fake servers inside the test process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import make_tiny_models
from support.fake_sglang import FakeServer, serve


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizer and config; its chat template ends messages with the end token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_models.build_tokenizer(1024, 4096).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    return folder


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """A function that starts a fake server with the given settings."""
    started = []

    def start(**settings: Any) -> FakeServer:
        fake = FakeServer(**settings)
        server = serve(fake)
        # It sees the end of the test when it looks up, by itself twice a second.
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        started.append(server)
        return fake

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
