"""Command lines up to the point where weights would be loaded, on a machine with a pretended GPU.

SGLang's own argument handling and model configuration run for real; only what asks for the device
and its memory is answered from here. `pretend_gpu` changes this process for good: call it in a
child; the others leave it as it was.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest

GIB = 1 << 30
GPU_GIB = 80
ROOT = Path(__file__).resolve().parents[2]


class Reached(Exception):
    """The command got as far as loading the model."""


def pretend_gpu() -> None:
    """Pretend that this machine has one GPU like an H100, with its memory, and 128 GiB beside."""
    import torch
    from sglang.srt.utils import common

    import sglang_hc.memory
    from benchmark.harness import machine

    found = SimpleNamespace(
        name="NVIDIA H100", major=9, minor=0, total_memory=GPU_GIB * GIB, multi_processor_count=132
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: found
    cuda.get_device_name = lambda device=None: found.name
    cuda.mem_get_info = lambda device=None: (GPU_GIB * GIB, GPU_GIB * GIB)
    theirs: Any = common
    theirs.get_nvgpu_memory_capacity = lambda: GPU_GIB * 1024
    for known in list(vars(common).values()):  # what SGLang has found on this machine
        getattr(known, "cache_clear", int)()
    memory: Any = sglang_hc.memory
    memory.meminfo = lambda field: 128 * GIB
    memory.cgroups = list
    tool: Any = machine
    tool.has_gpu = lambda: True


def resolve(words: Sequence[str], ours: bool = True) -> None:
    """What a server does with its flags before it loads weights. ours: started by our launcher.
    Raises what SGLang raises."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    os.environ["SGLANG_HC_ENABLE"] = "1" if ours else "0"
    load_plugins()
    args = prepare_server_args(["--device", "cuda", *words])
    args.resolve_once()
    ModelConfig.from_server_args(args)


def try_server(words: Sequence[str]) -> list[str]:
    """`sglang_hc.launch_server WORDS`, with a small model where the words name none."""
    seen: list[str] = []
    model = () if "--model-path" in words else ("--model-path", "models/llama-mha")
    with _unchanged():
        _note(seen, "launch_server", lambda: resolve([*model, *words]))
    return seen or ["server"]


def run_script(name: str, words: Sequence[str]) -> list[str]:
    """Run a benchmark, by its module's name, with every engine and server replaced by `resolve`.

    Returns one line for each engine or server, and one with `!` in front for what went wrong.
    """
    with _unchanged():
        seen: list[str] = []
        _engines(seen)
        _servers(seen)
        _cases(seen)
        _main(name, words, seen)
        return seen


def parse_only(name: str | None, words: Sequence[str]) -> list[str]:
    """Only the parser of a benchmark, of a script by its path, or of `sglang-hc`; `!` and its words
    when it refuses them."""
    with _unchanged():
        seen: list[str] = []
        _parsers()
        if name is None:
            from sglang_hc.tools.cli.main import main

            _note(seen, "sglang-hc", lambda: main(list(words)))
        else:
            _main(name, words, seen)
        return seen


@contextmanager
def _unchanged() -> Iterator[None]:
    """What commands and these functions change is as before afterwards."""
    from sglang.srt.managers.scheduler import Scheduler

    from benchmark.harness import suite

    places: list[tuple[Any, str]] = [
        (argparse.ArgumentParser, "parse_known_args"), (subprocess, "run"), (sys, "argv"),
        (Scheduler, "__init__"), (suite.Suite, "run"),
    ]  # fmt: skip
    with mock.patch.dict(os.environ), pytest.MonkeyPatch.context() as patch:
        for place, name in places:
            patch.setattr(place, name, getattr(place, name))
        patch.chdir(ROOT)
        yield


def _parsers() -> None:
    """Argument parsers end the command when they have understood it."""
    original = argparse.ArgumentParser.parse_known_args
    depth = [0]

    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        depth[0] += 1  # sub-commands have parsers of their own
        found = original(self, *args, **kwargs)
        depth[0] -= 1
        if depth[0] == 0:
            if found[1]:
                self.error(f"unrecognized arguments: {' '.join(found[1])}")
            raise Reached
        return found

    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]


def _main(name: str, words: Sequence[str], seen: list[str]) -> None:
    is_path = name.endswith(".py")
    sys.argv = [str(ROOT / (name if is_path else f"{name.replace('.', '/')}.py")), *words]
    run = runpy.run_path if is_path else runpy.run_module
    _note(seen, name, lambda: run(sys.argv[0] if is_path else name, run_name="__main__"))


def _note(seen: list[str], what: str, work: Callable[[], object]) -> None:
    """Runs `work` to the engine; a refusal of its flags is exit status 2."""
    try:
        work()
    except Reached:
        seen.append(f"{Path(what).name} was understood")
    except SystemExit as end:
        if end.code == 2:
            seen.append(f"!{Path(what).name} {shlex.join(sys.argv[1:])}: refused")
        elif isinstance(end.code, str):
            seen.append(f"!{Path(what).name}: {end.code}")
    except Exception as error:
        seen.append(f"!{Path(what).name}: {type(error).__name__}: {error}")


def _engines(seen: list[str]) -> None:
    """Engines inside this process: the real Core up to its scheduler."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins

    load_plugins()

    def build(self: Any, args: Any, *rest: Any, **named: Any) -> NoReturn:
        ModelConfig.from_server_args(args)
        seen.append(f"engine {args.model_path}")
        raise Reached

    Scheduler.__init__ = build  # type: ignore[method-assign]


def _servers(seen: list[str]) -> None:
    """Servers of the benchmarks: every arm's flags."""
    from benchmark.harness import arms, suite

    def run(self: Any) -> NoReturn:
        for arm in self._arms:
            ours = arm.module == arms.HC_MODULE
            before = len(seen)
            _note(seen, f"server {arm.name}", partial(resolve, arm.args, ours))
            if len(seen) == before:
                seen.append(f"server {arm.name}")
        raise Reached

    suite.Suite.run = run  # type: ignore[method-assign]


def _cases(seen: list[str]) -> None:
    """Processes of a benchmark's cases: the same module in this one."""
    original = subprocess.run

    def run(words: Any, *args: Any, **kwargs: Any) -> Any:
        if "--case" not in words:
            return original(words, *args, **kwargs)
        at = words.index("--case")
        before = list(sys.argv)
        _main(words[at - 1], words[at:], seen)
        sys.argv = before
        return SimpleNamespace(returncode=1, stdout="", stderr="a dry run measures nothing")

    subprocess.run = run  # type: ignore[assignment]
