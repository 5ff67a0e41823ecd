"""The tiers' machine over a disk that is late, fails and dies (`support/disk_machine.py`)."""

from __future__ import annotations

from hypothesis import settings

from sglang_hc.forms import LayerPlan
from support.copy_streams import LateCopyStream
from support.disk_machine import SEEN, DiskMachine
from support.examples import examples
from support.tiers_machine import PROFILE


class LateDiskMachine(DiskMachine):
    plan = LayerPlan(0, 2, 1)

    def make_copy_stream(self) -> object:
        return LateCopyStream()


for machine in (DiskMachine, LateDiskMachine):
    # With 25 it was left to chance whether the disk dies while it has something to do.
    machine.TestCase.settings = settings(PROFILE, max_examples=examples(60))
TestDisk = DiskMachine.TestCase
TestLateDisk = LateDiskMachine.TestCase


def test_the_machines_used_the_disk() -> None:
    """Runs last: properties of what never happens hold trivially."""
    assert all(SEEN[name] > 0 for name in ("saved", "loaded", "failed", "lost")), SEEN
