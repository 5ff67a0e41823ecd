"""What goes below host memory is alike on all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sglang_hc.srt.start.stores import admission_of


def test_ranks_whose_parts_have_different_sizes_write_the_same_blocks() -> None:
    """Stages have different layers. Each rank spent its budget at its own pace: one began a write
    that the others did not, and took the next answer for its own."""
    sizes, taken = [100, 140], []
    for own in sizes:
        group = SimpleNamespace(each=lambda size: sizes if size in sizes else [size, size])
        model = SimpleNamespace(
            config=SimpleNamespace(write=str(24 * 2400)), state=SimpleNamespace(group=group)
        )
        memory = SimpleNamespace(
            pool=SimpleNamespace(layout=SimpleNamespace(slot_bytes=own, ends=None))
        )
        ranks = SimpleNamespace(clock=lambda: 0.0)
        admission = admission_of(*cast(Any, (model, memory, ranks)))
        assert admission is not None
        taken.append(sum(admission.take(0.0) for _ in range(50)))
    assert taken == [10, 10], "of both parts together"
