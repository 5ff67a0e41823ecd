"""First in, first out, by conversations."""

from __future__ import annotations

from sglang_hc.tools.simulator.disk import SimulatedDisk
from sglang_hc.tools.simulator.policies import FifoPolicy


class Disk:
    """A disk of five blocks, which are named by the letters of their path."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(5, FifoPolicy())
        self.named: list[str] = []

    def store(self, path: str) -> None:
        """Store what is missing of a path."""
        for end in range(1, len(path) + 1):
            if not self.disk.holds(path[:end].encode()):
                parent = path[: end - 1].encode() if end > 1 else None
                assert self.disk.write(parent, path[:end].encode(), 0.0)
                self.named.append(path[:end])

    def gone(self, newcomers: int) -> list[str]:
        """What leaves, in this order, while so many others come."""
        order: list[str] = []
        for number in range(newcomers):
            self.disk.write(None, b"new%d" % number, 0.0)
            here = {name for name in self.named if self.disk.holds(name.encode())}
            order += sorted(set(self.named) - here - set(order))
        return order


def test_a_conversation_that_grows_keeps_its_age() -> None:
    disk = Disk()
    disk.store("ab")
    disk.store("xy")
    disk.store("abc")
    disk.disk.access([b"a", b"ab", b"abc"])
    assert disk.gone(5) == ["abc", "ab", "a", "xy", "x"]


def test_a_branch_has_an_age_of_its_own() -> None:
    disk = Disk()
    disk.store("sa")  # s: a shared system prompt
    disk.store("sb")
    disk.store("sac")
    disk.store("t")
    assert disk.gone(5) == ["sac", "sa", "sb", "s", "t"]
