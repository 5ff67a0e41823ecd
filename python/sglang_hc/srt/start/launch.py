"""Starts SGLang's own server after proving that we are in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sglang_hc.command_line import add_flags, config_from
from sglang_hc.config import ConfigError
from sglang_hc.policy.layer_plan import explicit_plan
from sglang_hc.srt.arguments.server_args import ALWAYS_ENV, config_of
from sglang_hc.srt.binding import arguments

HELP = "--hc-help"
USAGE = "python -m sglang_hc.launch_server --model-path MODEL [flags of SGLang] [--hc-* flags]"


def launch(argv: Sequence[str]) -> int:
    """Run the server with SGLang's and our flags. Returns the exit status; 2: a user's mistake."""
    if HELP in argv:
        _OwnFlags().print_help()
        return 0
    os.environ[ALWAYS_ENV] = "1"
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        server_args = _checked(argv)
    except ConfigError as error:
        print(f"sglang-hc: {error}", file=sys.stderr)
        return 2
    if config_of(server_args) is not None:
        from sglang.srt.entrypoints.http_server import app

        from sglang_hc.srt.requests import routes

        routes.mount(app)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _checked(argv: Sequence[str]) -> Any:
    """SGLang's server arguments. Raises ConfigError for what can be known to be wrong before any
    process is started."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_hc.srt.engine import in_place

    load_plugins()
    missing = in_place.missing()
    if missing:
        raise ConfigError(
            f"not in place: {', '.join(missing)}. Install sglang-hc into this environment (pip "
            "install . in its source tree) and keep hc in SGLANG_PLUGINS if you set that"
        )
    _check_flags(argv)
    _check_model(argv)
    server_args = prepare_server_args(list(argv))
    if config_of(server_args) is not None:
        arguments.resolve(server_args)
    _check_plan(server_args)
    return server_args


class _OwnFlags(argparse.ArgumentParser):
    """Of our flags alone. Raises ConfigError where argparse would print its usage and exit."""

    def __init__(self) -> None:
        super().__init__(usage=USAGE, add_help=False, allow_abbrev=False)
        self.add_argument(HELP, action="store_true", help="show these flags; --help shows all")
        add_flags(self)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _check_flags(argv: Sequence[str]) -> None:
    """Raise ConfigError for a wrong value of ours: SGLang's parser would print its whole usage."""
    config_from(_OwnFlags().parse_known_args(argv)[0])


def _check_model(argv: Sequence[str]) -> None:
    """Raise ConfigError for a local path that is no model. Anything else SGLang resolves itself."""
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name in ("--model-path", "--model"):
            path = value or (argv[index + 1] if index + 1 < len(argv) else "")
            folder = Path(path)
            looks_local = path.startswith((".", "/", "~")) or folder.exists()
            wrong = None
            if looks_local and folder.is_dir() and not (folder / "config.json").is_file():
                wrong = "has no config.json"
            if looks_local and not folder.exists():
                wrong = "does not exist"
            if wrong is not None:
                raise ConfigError(f"--model-path {path} {wrong}; give a folder with a model in it")


def _check_plan(server_args: Any) -> None:
    """Raise ConfigError for a plan that does not fit the model."""
    config = config_of(server_args)
    if config is None or config.forms in ("auto", "kv", "hidden"):
        return
    model = arguments.model_config(server_args)
    if explicit_plan(config.forms, model.num_hidden_layers).recompute:
        from sglang_hc.srt.model.recompute import cannot_recompute, recompute_excluded

        reason = recompute_excluded(server_args, model.hf_config.architectures[0])
        if reason is not None:
            raise ConfigError(cannot_recompute(config.forms, reason))
