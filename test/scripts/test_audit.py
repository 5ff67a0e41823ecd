"""An audit that did not happen never reads as one that found nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import audit

SAFE = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "X-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def test_local_versions_and_addresses_are_not_asked_for() -> None:
    assert audit.pinned("torch==2.9+cpu\nx @ file:///w/x.whl\na==1\n") == ["torch==2.9", "a==1"]


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ([SAFE], 0, ["1 of 1 packages audited, 0 vulnerabilities known"]),
        ([SAFE, BAD], 1, ["b 2: X-1, fixed in 3", "2 of 2 packages audited, 1 vulnerabilities"]),
        ([SAFE, SKIPPED], 0, ["1 of 2 packages audited", "NOT AUDITED, the index knows no", "c"]),
        (None, 0, ["NOT AUDITED: the advisories could not be read (no network)"]),
    ],
)
def test_what_is_known_fails_and_what_is_not_is_said(
    found: list[dict[str, Any]] | None,
    status: int,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("a==1\n")
    monkeypatch.setattr(audit, "ask", lambda pins: (found, "no network"))
    monkeypatch.setattr(sys, "argv", ["audit", str(lock)])
    assert audit.main() == status
    shown = capsys.readouterr().out
    assert all(words in shown for words in said)
