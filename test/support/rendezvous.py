"""How the ranks of an engine find each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any


@contextmanager
def rendezvous(args: Any) -> Iterator[None]:
    """An engine of one rank, by SGLang's arguments, needs no port while it is built: another
    process may take one that was free before it listens there. Several ranks meet at a port."""
    if args.tp_size * args.pp_size > 1:
        yield
        return
    name = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
    with TemporaryDirectory() as folder:
        os.environ[name] = f"file://{folder}/store"
        try:
            yield
        finally:
            del os.environ[name]
