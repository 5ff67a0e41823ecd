"""The simulated disk tier under every policy: prefixes only, and never above its size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.eviction import POLICIES, make_policy
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tools.simulator.disk import SimulatedDisk
from sglang_hc.tools.simulator.policies import FifoPolicy


def chain(path: str) -> list[bytes]:
    return [path[: end + 1].encode() for end in range(len(path))]


def write(disk: SimulatedDisk, path: str, now: float) -> None:
    parent = None
    for identity in chain(path):
        if not disk.holds(identity) and not disk.write(parent, identity, now):
            break
        parent = identity


def test_a_block_can_be_read_once_its_write_is_through():
    window = LookAhead()
    disk = SimulatedDisk(4, make_policy("lru", window))
    assert disk.write(None, b"a", ready_at=3.0)
    assert not disk.readable(b"a", 2.9) and disk.readable(b"a", 3.0)
    assert not disk.write(b"missing", b"b", 1.0), "unreachable"


def test_a_newcomer_that_nobody_needs_does_not_displace_what_is_needed():
    window = LookAhead()
    disk = SimulatedDisk(2, make_policy("queue", window))
    write(disk, "ab", 0.0)
    window.update(["r"], 1, lambda _: chain("ab"))
    write(disk, "x", 1.0)
    assert disk.holds(b"ab") and not disk.holds(b"x")


paths = st.text("abc", min_size=1, max_size=6)
operations = st.lists(st.tuples(st.sampled_from(["write", "use", "wait"]), paths))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(POLICIES), operations)
def test_only_prefixes_are_kept(name, history):
    window = LookAhead()
    disk = SimulatedDisk(7, make_policy(name, window))
    for step, (action, path) in enumerate(history):
        if action == "write":
            write(disk, path, float(step))
        elif action == "use":
            disk.access(chain(path))
        else:
            window.update([path], 1, chain)
        disk.check_integrity()


@pytest.mark.parametrize(
    ("stored", "left"),
    [
        (("ab", "xy", "abc"), "abc ab a xy x"),  # what grows keeps its age
        (("sa", "sb", "sac", "t"), "sac sa sb s t"),  # a branch has its own
    ],
)
def test_first_in_first_out_goes_by_conversations_and_not_by_uses(stored, left):
    disk, there, order = SimulatedDisk(5, FifoPolicy()), set(), []
    for path in stored:
        write(disk, path, 0.0)
        there.update(chain(path))
    disk.access(chain(stored[-1]))
    for number in range(5):
        disk.write(None, b"new%d" % number, 0.0)
        gone = sorted(name for name in there if not disk.holds(name))
        order += gone
        there.difference_update(gone)
    assert b" ".join(order).decode() == left
