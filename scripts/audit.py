"""Known vulnerabilities of what `make setup` installed, asked of the package index by pip-audit.

    python scripts/audit.py .venv/lock.txt

Status 0: nothing is known, or it could not be found out, which is said; 1: something is known.
pip-audit calls a package that the index knows no advisories of "skipped" and reports success, so
its own status says nothing on a machine that reaches a mirror only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT_S = 600


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("lock", type=Path, help="lines NAME==VERSION")
    found, said = ask(pinned(options.parse_args().lock.read_text()))
    for line in report(found, said):
        print(f"audit: {line}")
    return 1 if found is not None and any(one.get("vulns") for one in found) else 0


def pinned(text: str) -> list[str]:
    """The pins of a lock as the index knows them: without local versions such as `+cpu`."""
    return [line.partition("+")[0] for line in text.splitlines() if "==" in line]


def ask(pins: list[str]) -> tuple[list[dict[str, Any]] | None, str]:
    """(pip-audit's findings by package, None when it gave none; the last of what it said)."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{pin}\n" for pin in pins))
        file.flush()
        words = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        command = [sys.executable, "-m", "pip_audit", *words, "-r", file.name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer in {TIMEOUT_S} s"
    last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
    try:
        return json.loads(done.stdout)["dependencies"], last
    except (ValueError, KeyError, TypeError):
        return None, last


def report(found: list[dict[str, Any]] | None, said: str) -> list[str]:
    """What a reader is to know, a line each."""
    if found is None:
        return [f"NOT AUDITED: the advisories could not be read ({said})"]
    lines = []
    for one in found:
        for known in one.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "no version"
            lines.append(f"{one['name']} {one['version']}: {known['id']}, fixed in {fixed}")
    unknown = [one["name"] for one in found if "skip_reason" in one]
    audited = len(found) - len(unknown)
    lines.append(f"{audited} of {len(found)} packages audited, {len(lines)} vulnerabilities known")
    if unknown:
        lines.append(f"NOT AUDITED, the index knows no advisories of: {', '.join(unknown)}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
