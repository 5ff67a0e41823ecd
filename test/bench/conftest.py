"""A fixture that starts fake servers inside the test process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_sglang import FakeServer, serve


@pytest.fixture
def fake_server() -> Iterator[Callable[..., FakeServer]]:
    """A function that starts a fake server with the given settings."""
    started = []

    def start(**settings: Any) -> FakeServer:
        fake = FakeServer(**settings)
        server = serve(fake)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return fake

    yield start
    for server in started:
        server.shutdown()
        server.server_close()
