"""Everything that a GPU has to show, in one command that may be cut off at any time.

    python -m benchmark.gpu.campaign --minutes 25 --output DIR
    python -m benchmark.gpu.campaign --minutes 9 --output DIR2 --done DIR/cells.jsonl   # goes on
    python -m benchmark.gpu.campaign --rehearse --output DIR       # tiny models, on a CPU
    python -m benchmark.gpu.campaign --list                        # the steps and their minutes
    python -m benchmark.gpu.campaign --page DIR                    # the page again, from the cells
    python -m benchmark.gpu.campaign --results DIR                 # into benchmark/results

The steps run in order of value, each in a process with a limit of its own. Every measurement is a
line of DIR/cells.jsonl the moment it is there; a step that fails or is killed leaves a line with
the reason, and the next one runs. Called again, it does what is missing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmark import ROOT
from benchmark.gpu import install
from benchmark.gpu.runner import CELLS, LOG, PAGE, RESERVE_S, Runner, Step, in_order, say
from benchmark.gpu.steps import STEPS
from benchmark.harness import machine

REHEARSAL_MINUTES = 15.0


def main(words: Sequence[str] | None = None, steps: Sequence[Step] = STEPS) -> int:
    """Returns the exit status: 0 when no step of this call failed, 1 otherwise, 2: wrong usage."""
    words = list(sys.argv[1:] if words is None else words)
    args = _arguments(words)
    if args.list:
        print("\n".join(listing(chosen(steps, args.only), args.output)))
        return 0
    problem = install.ensure(args.bundle, ["-m", "benchmark.gpu.campaign", *words])
    if problem:
        return _refuse(problem)
    if args.page or args.results:
        return _publish(args.page, args.results)
    if args.output is None:
        return _refuse("--output DIR is needed: the folder for cells.jsonl and the page")
    steps = chosen(steps, args.only)
    if not steps:
        return _refuse(f"--only {args.only}: no such step; --list prints their names")
    return _measure(args, steps)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="all that this call may take (default 25)")
    parser.add_argument("--output", type=Path, help=f"folder for {CELLS}, {LOG} and {PAGE}")
    parser.add_argument(
        "--done", type=Path, action="append", default=[], metavar="CELLS",
        help="cells of an earlier call: taken over, not measured again",
    )  # fmt: skip
    parser.add_argument("--only", metavar="STEPS", help="these steps, with commas between them")
    parser.add_argument("--server-args", help="further SGLang flags for every engine and server")
    parser.add_argument(
        "--bundle", type=Path, default=ROOT / ".whl", metavar="DIR",
        help="folder with env.sh and wheels, used where sglang is not installed (default .whl)",
    )  # fmt: skip
    parser.add_argument("--rehearse", action="store_true", help="tiny models, for a CPU")
    parser.add_argument("--list", action="store_true", help="print the steps, run nothing")
    parser.add_argument("--page", type=Path, metavar="DIR", help=f"make {PAGE} from {CELLS} again")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help=f"make benchmark/results/*.json from {CELLS}"
    )
    return parser.parse_args(words)


def chosen(steps: Sequence[Step], only: str | None) -> list[Step]:
    """The steps named by --only, in their usual order."""
    names = None if only is None else only.split(",")
    return [step for step in steps if names is None or step.name in names]


def listing(steps: Sequence[Step], output: Path | None) -> list[str]:
    """One line for each step that is still to do, with minutes as they add up."""
    todo = list(steps) if output is None else in_order(steps, output / CELLS)
    lines, total = [f"{'step':26} {'minutes':>7} {'sum':>6}  what"], 0.0
    for step in todo:
        total += step.minutes
        lines.append(f"{step.name:26} {step.minutes:7.1f} {total:6.1f}  {step.about}")
    return lines


def _measure(args: argparse.Namespace, steps: Sequence[Step]) -> int:
    began = install.began()
    minutes = args.minutes or (REHEARSAL_MINUTES if args.rehearse else 25.0)
    if 60 * minutes <= RESERVE_S:
        return _refuse(f"--minutes {minutes:g} leaves nothing beside {RESERVE_S:g} s for the page")
    missing = [str(path) for path in args.done if not path.is_file()]
    if missing:
        return _refuse(
            f"--done {missing[0]}: no such file; give the cells.jsonl of an earlier call"
        )
    if args.rehearse:
        steps = [step for step in steps if step.rehearsal is not None or step.gpu_only]
    args.output.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="hc-campaign-") as scratch:
        runner = Runner(
            args.output, began + 60 * minutes, Path(scratch), install.environment(Path(scratch)),
            gpu=machine.has_gpu() and not args.rehearse, rehearse=args.rehearse,
            server_args=install.server_args() if args.server_args is None else args.server_args,
        )  # fmt: skip
        say(f"{runner.carry_over(args.done)} cells taken over, {minutes:g} minutes")
        try:
            runner.run(steps)
        except KeyboardInterrupt:
            say("interrupted")
    _page(args.output)
    return 1 if runner.failed(steps) else 0


def _publish(page: Path | None, results: Path | None) -> int:
    for folder in (page, results):
        if folder is not None and not (folder / CELLS).is_file():
            return _refuse(f"{folder} has no {CELLS}; give the --output of a campaign")
    if page is not None:
        _page(page)
    if results is not None:
        from benchmark.gpu.published import publish

        for path in publish(results / CELLS, ROOT / "benchmark" / "results"):
            print(path)
    return 0


def _page(output: Path) -> None:
    from benchmark.gpu.summary import write_page

    write_page(output / CELLS, output / PAGE)
    say(f"{output / PAGE} and {output / CELLS}")


def _refuse(sentence: str) -> int:
    print(f"campaign.py: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
