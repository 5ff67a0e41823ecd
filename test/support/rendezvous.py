"""How the ranks of an engine find each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory


@contextmanager
def meeting_alone(alone: bool) -> Iterator[None]:
    """A rank that is alone meets nobody over a port: another process may take one that was free."""
    name = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    with TemporaryDirectory() as folder:
        if alone:
            os.environ[name] = f"file://{folder}/store"
        try:
            yield
        finally:
            os.environ.pop(name, None)
