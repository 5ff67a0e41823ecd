"""The application of a tokenizer worker (`--tokenizer-worker-num` above 1), with our hooks.

Each worker is a fresh process that imports an application by its name. SGLang's own name would load
no plugins; so with the tiers on it is given the name of `app` here (`server_args.WORKER_APP`),
which is SGLang's too.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`app`, made when a server asks for it: other processes import this module as well."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang_hc.srt.engine import in_place

    missing = in_place.missing()
    if missing:
        raise RuntimeError(f"sglang-hc: not in place in a tokenizer worker: {', '.join(missing)}")
    from sglang.srt.entrypoints.http_server import app

    from sglang_hc.srt.requests import routes

    routes.mount(app)
    globals()["app"] = app
    return app
