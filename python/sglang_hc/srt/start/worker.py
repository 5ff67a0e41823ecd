"""The application of a tokenizer worker (`--tokenizer-worker-num` above 1), with our hooks.

Each worker is a fresh process in which uvicorn imports an application by its name. SGLang's own
name would load no plugins; so uvicorn is given the name of `app` here, which is SGLang's too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments

SGLANG_APP = "sglang.srt.entrypoints.http_server:app"
OWN_APP = "sglang_hc.srt.start.worker:app"


def serve(original: Callable[..., Any], app: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND uvicorn.run: with the tiers on, workers import SGLang's application from here."""
    if app == SGLANG_APP:
        from sglang.srt.entrypoints.http_server import get_global_state

        if config_of(arguments.of(get_global_state().tokenizer_manager)) is not None:
            app = OWN_APP
    return original(app, *args, **kwargs)


def __getattr__(name: str) -> Any:
    """`app`, made when uvicorn asks for it: other processes import this module as well."""
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
