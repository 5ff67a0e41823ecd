"""`sglang-hc profile`: measure this machine for one model and write the profile file."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_hc import profile_file
from sglang_hc.config import check_disk
from sglang_hc.tools.cli.main import UsageError, blaming


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--model", required=True, metavar="PATH", help="the model to load")
    parser.add_argument(
        "--output", required=True, metavar="FILE", help="the profile, for --hc-profile"
    )
    parser.add_argument(
        "--hc-disk",
        action="append",
        default=[],
        metavar="DIR[:SIZE_GB]",
        help="measure this directory too, as given to the server; repeat for several SSDs",
    )
    parser.add_argument(
        "sglang_flags",
        nargs="*",
        metavar="-- SGLANG_FLAGS",
        help="flags of SGLang that matter for the costs, such as --dtype float16",
    )


def run(args: argparse.Namespace) -> int:
    """Load the model as a server would, measure, write. Raises ConfigError."""
    model, output = Path(args.model), Path(args.output)
    if model.exists() and not (model / "config.json").is_file():
        raise UsageError(f"--model: {model} has no config.json; give a folder with a model in it")
    if not output.parent.is_dir():
        raise UsageError(f"--output: the folder {output.parent} does not exist; make it first")
    with blaming("--hc-disk"):
        for disk in args.hc_disk:
            check_disk(disk)
    from sglang_hc.srt.start.calibrate_command import profile_model

    cost = profile_model(args.model, tuple(args.hc_disk), args.sglang_flags)
    try:
        profile_file.save(cost, output)
    except OSError as error:
        raise UsageError(f"--output: {output} cannot be written ({error})") from error
    print(f"{output}: {cost.fingerprint}")
    return 0
