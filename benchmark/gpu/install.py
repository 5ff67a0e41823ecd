"""Makes the campaign run in a bare checkout on a machine without a network.

A bundle is a folder with an `env.sh`, which bash can source: it installs the wheels that lie beside
it and sets the environment. What this source tree itself needs comes from the tree: its packages
are put on PYTHONPATH, and so is the entry point by which SGLang finds them.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmark import ROOT

MARK = "HC_CAMPAIGN_BEGAN"
"""Time of `time.monotonic` when a bundle was sourced; set, so that it happens once."""

PLUGINS = "sglang.srt.plugins"
ENTRY = "hc = sglang_hc.srt.plugin:activate"
PACKAGES = ("python", "sgl-kernel-ext/python")

TRITON_FLAGS = "--attention-backend triton --sampling-backend pytorch --grammar-backend none"
"""What SGLang needs where flashinfer and its grammar library are missing."""


def ensure(bundle: Path, words: Sequence[str]) -> str | None:
    """Make `sglang` importable: nothing to do, or start again behind the bundle's env.sh.

    words: the command line to start again with. Returns one sentence when neither is possible.
    """
    if importlib.util.find_spec("sglang") is not None:
        return None
    script = bundle / "env.sh"
    if os.environ.get(MARK) or not script.is_file():
        return (
            f"sglang cannot be imported and --bundle {bundle} has no env.sh that installs it; see "
            "benchmark/gpu/README.md, or pip install -e . where there is a network"
        )
    os.environ[MARK] = str(time.monotonic())
    # The file may set variables without exporting them; the steps need them all.
    line = 'set -a; . "$0" || exit 1; set +a; exec "$@"'
    command = ["bash", "-c", line, str(script.resolve()), sys.executable, *words]
    sys.stdout.flush()
    os.execvp("bash", command)


def began() -> float:
    """When this call began, the installation included; of `time.monotonic`."""
    return float(os.environ.get(MARK) or time.monotonic())


def environment(scratch: Path) -> dict[str, str]:
    """Variables for the steps: this tree first, and an entry point when none is installed."""
    paths = [str(ROOT / name) for name in PACKAGES]
    if not any(point.name == "hc" for point in metadata.entry_points(group=PLUGINS)):
        paths.append(str(entry_point(scratch)))
    paths += [path for path in (os.environ.get("PYTHONPATH", ""),) if path]
    return {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def server_args() -> str:
    """Flags that every server needs here: the bundle's SGL_FLAGS, else by what is there."""
    given = os.environ.get("SGL_FLAGS")
    if given is not None:
        return given
    without = os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE", "").lower() in ("0", "false")
    return TRITON_FLAGS if without else ""


def entry_point(scratch: Path) -> Path:
    """A folder with the metadata that pip would have written."""
    from sglang_hc import __version__

    folder = scratch / "site"
    info = folder / f"sglang_hc-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    name = f"Metadata-Version: 2.1\nName: sglang-hc\nVersion: {__version__}\n"
    (info / "METADATA").write_text(name)
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\n{ENTRY}\n")
    return folder
