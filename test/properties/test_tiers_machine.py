"""The tiers' machine (`support/tiers_machine.py`) with each layer plan, with late copies, and over
a disk that is late, fails and dies (`support/disk_machine.py`)."""

from __future__ import annotations

from hypothesis import settings

from sglang_hc.forms import LayerPlan
from support.copy_streams import LateCopyStream
from support.disk_machine import SEEN, DiskMachine
from support.examples import examples
from support.tiers_machine import EARLY, PROFILE, RESTORED, TiersMachine


class HiddenMachine(TiersMachine):
    plan = LayerPlan(0, 2, 0)


class KvMachine(TiersMachine):
    plan = LayerPlan(0, 0, 2)


class LateMachine(TiersMachine):
    """Copies happen as late as the fences allow."""

    plan = LayerPlan(0, 4, 2)
    ring = 8192

    def make_copy_stream(self) -> object:
        return LateCopyStream()


class RecomputeMachine(TiersMachine):
    """The first layer is not stored."""

    plan = LayerPlan(1, 2, 1)


class LateDiskMachine(DiskMachine):
    plan = LayerPlan(0, 2, 1)

    def make_copy_stream(self) -> object:
        return LateCopyStream()


MACHINES = (TiersMachine, HiddenMachine, KvMachine, LateMachine, RecomputeMachine)
for machine in MACHINES:
    machine.TestCase.settings = PROFILE
TestMixed = TiersMachine.TestCase
TestHidden = HiddenMachine.TestCase
TestKv = KvMachine.TestCase
TestLate = LateMachine.TestCase
TestRecompute = RecomputeMachine.TestCase
for machine in (DiskMachine, LateDiskMachine):
    # With 25 it was left to chance whether the disk dies while it has something to do.
    machine.TestCase.settings = settings(PROFILE, max_examples=examples(60))
TestDisk = DiskMachine.TestCase
TestLateDisk = LateDiskMachine.TestCase


def test_a_block_whose_rows_failed_before_leaves_with_those_behind_it() -> None:
    machine = HiddenMachine()
    machine.begin(None, 0, 0, [0, 1, 2] * 50)
    for row in range(150):  # one at a time, as in decode steps: the executor scatters these
        machine.compute(0, 1)
        if row % 10 == 9:
            machine.tiers.capture.flush()
            machine.executor.fail_next = int(row < 64)
            machine.scatter(9)
    machine.keep(0, True)
    machine.every_slot_has_one_owner()
    assert machine.tiers.host.published_blocks == 0
    assert machine.tiers.capture.counters["scatter_failed"] > 0


def test_the_machines_restored_something() -> None:
    """Runs last: properties of what is never served hold trivially."""
    for machine in MACHINES:
        # Not more than some: what is drawn depends on constants anywhere in the package.
        assert RESTORED[machine.__name__] > 0, RESTORED
    assert sum(EARLY.values()) > 0
    assert all(SEEN[name] > 0 for name in ("saved", "loaded", "failed", "lost")), SEEN
