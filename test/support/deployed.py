"""Files of `deploy/` carried out on this machine: the steps of the image in an environment of its
own, and commands with what compose would put into them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.dashboards import DEPLOY

ROOT = DEPLOY.parent


def filled(
    words: Sequence[str], values: Mapping[str, str], instead: Mapping[str, str] | None = None
) -> list[str]:
    """Words of a compose file with these variables, and other paths or ports instead of its."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1], match[2])

    text = "\n".join(re.sub(r"\$\{(\w+):[-?]([^}]*)\}", value, word) for word in words)
    for part, own in (instead or {}).items():
        text = re.sub(rf"(?<![\w/]){re.escape(part)}\b", own, text)
    return text.split("\n")


def without_python() -> dict[str, str]:
    """This process's environment but for what tells a Python where to look."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def fresh_environment(folder: Path) -> Path:
    """Programs of a new environment that finds SGLang and torch where the tests have them, but not
    what is installed there as editable: that takes a .pth file, and Python reads none in a folder
    which another one names."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=without_python())
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@dataclass
class Image:
    """What became of a Containerfile's steps. root: its file system. programs: those of its
    Python."""

    root: Path
    programs: Path
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    start: list[str] = field(default_factory=list)
    """Entry point."""
    asked: list[str] = field(default_factory=list)
    """Arguments where none are given."""

    @property
    def environment(self) -> dict[str, str]:
        own = {name: f"{self.root}{value}" for name, value in self.env.items()}
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        return {**without_python(), **own, "PATH": path}

    def run(self, words: Sequence[str], **env: str) -> str:
        """What a command in the image prints."""
        done = subprocess.run(
            words, cwd=self.folder, env=self.environment | env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def built(folder: Path) -> Image:
    """The image of `deploy/`: each step as it is written, on a base that has SGLang."""
    programs, root = fresh_environment(folder / "python"), folder / "root"
    image = Image(root, programs, root)
    root.mkdir()
    arguments: dict[str, str] = {}
    for kind, rest in _steps((DEPLOY / "Containerfile").read_text()):
        if kind == "ARG":
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif kind == "WORKDIR":
            image.folder = Path(f"{root}{rest}")
            image.folder.mkdir(parents=True)
        elif kind == "COPY":
            *sources, target = rest.split()
            for source in sources:
                _copy(ROOT / source, image.folder / target)
        elif kind == "RUN":
            image.run(["sh", "-c", rest], **arguments)
        elif kind == "ENV":
            image.env |= dict(pair.split("=", 1) for pair in rest.split())
        elif kind == "ENTRYPOINT":
            image.start = json.loads(rest)
        elif kind == "CMD":
            image.asked = json.loads(rest)
        else:
            assert kind in ("FROM", "VOLUME", "EXPOSE"), kind
    return image


def _steps(text: str) -> Iterator[tuple[str, str]]:
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for step in lines.replace("\\\n", "").splitlines():
        if step.strip():
            kind, _, rest = step.strip().partition(" ")
            yield kind, rest


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    else:
        shutil.copy(source, target)
