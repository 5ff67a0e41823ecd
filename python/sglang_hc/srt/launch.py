"""Starts SGLang's own server after proving that we are in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_hc.config import ConfigError
from sglang_hc.forms import PlanError
from sglang_hc.srt.server_args import ALWAYS_ENV, config_of, explicit_plan


def launch(argv: Sequence[str]) -> int:
    """Run the server with SGLang's and our flags. Returns the exit status; 2: a user's mistake."""
    os.environ[ALWAYS_ENV] = "1"
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    from sglang_hc.srt import plugin

    load_plugins()
    missing = plugin.missing()
    if missing:
        return _refuse(
            f"not in place: {', '.join(missing)}. Install the package into this environment "
            "(pip install sglang-hc) and leave it in SGLANG_PLUGINS if you set that"
        )
    problem = _model_problem(argv)
    if problem:
        return _refuse(problem)
    try:
        server_args = prepare_server_args(list(argv))
    except ConfigError as error:
        return _refuse(str(error))
    problem = _plan_problem(server_args)
    if problem:
        return _refuse(problem)
    if config_of(server_args) is not None:
        from sglang.srt.entrypoints.http_server import app

        from sglang_hc.srt import routes

        routes.mount(app)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def _model_problem(argv: Sequence[str]) -> str | None:
    """A local model path that is no model. Anything else SGLang resolves itself."""
    for index, word in enumerate(argv):
        name, _, value = word.partition("=")
        if name in ("--model-path", "--model"):
            path = value or (argv[index + 1] if index + 1 < len(argv) else "")
            folder = Path(path)
            looks_local = path.startswith((".", "/", "~")) or folder.exists()
            if looks_local and folder.is_dir() and not (folder / "config.json").is_file():
                return f"--model-path {path} has no config.json; give a folder with a model in it"
            if looks_local and not folder.exists():
                return f"--model-path {path} does not exist; give a folder with a model in it"
    return None


def _plan_problem(server_args: Any) -> str | None:
    """A plan that does not fit the model, told before any process is started."""
    config = config_of(server_args)
    if config is None or config.forms in ("auto", "kv", "hidden"):
        return None
    model = server_args.get_model_config()
    try:
        plan = explicit_plan(config.forms, model.num_hidden_layers)
    except PlanError as error:
        return str(error)
    if plan.recompute:
        from sglang_hc.srt.model.recompute import cannot_recompute, recompute_excluded

        reason = recompute_excluded(server_args, model.hf_config.architectures[0])
        return reason and cannot_recompute(config.forms, reason)
    return None


def _refuse(message: str) -> int:
    print(f"sglang-hc: {message}", file=sys.stderr)
    return 2
