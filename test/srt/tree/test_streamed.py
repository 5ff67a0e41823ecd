"""What becomes of streamed blocks behind the pass that followed their reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.tree.streamed import StreamedPass
from sglang_hc.tree.identity import BLOCK_BYTES
from support.host import keep
from support.meeting_world import SPOKEN, WORD, World

HELD = 4
STOP = len(WORD) * BLOCK_TOKENS


class Pass:
    """A pass whose copies are under way when it is submitted."""

    def __init__(self) -> None:
        self.world = World(held=HELD)
        self.world.meeting.stream(HELD, len(WORD), 1.0)
        self.pinned: list[int] = []
        self.waited = False
        tree: Any = SimpleNamespace(
            tiers=SimpleNamespace(queue=SimpleNamespace(meetings=self), restorer=self, disk=self),
            audit=None,
            early=SimpleNamespace(drop_before=lambda head: None, hand_over=dict),
            allocate=torch.arange,
            promise=lambda req, nodes, slots, *_: (slots, None),
            page_size=1,
        )
        self.planner = SimpleNamespace(
            prefill_seconds=lambda new, context: 1.0, as_stored=lambda tokens: None
        )
        self.path = SimpleNamespace(copy_stream=SimpleNamespace(record=lambda: self))
        self.streamed = StreamedPass(tree)
        self.streamed.load_back(
            SimpleNamespace(
                rid="r",
                prefix_indices=range(self.world.head),
                full_untruncated_fill_ids=range(STOP + 1),
                _compute_max_prefix_len=lambda n: n - 1,
            )
        )
        while self.world.io.moves:
            self.world.deliver()

    def of(self, rid: str) -> Any:
        return self.world.meeting

    def join(self, rid: str, head: int) -> Any:
        return self.world.meeting.join(head, 0.0)

    def poll(self) -> None: ...

    def join_early(self, tokens: int) -> None: ...

    def keep(self, nodes: Any) -> None:
        self.pinned += [node.slot for node in nodes]

    def wait(self) -> None:
        self.waited = True


@pytest.mark.parametrize("computed", [False, True])
def test_no_slot_gets_another_owner_before_it_is_copied(computed: bool) -> None:
    """Another request computed and kept one of the blocks meanwhile. Its slot was pinned, and the
    one from which the pass still copied was free."""
    served = Pass()
    read_to = {served.world.meeting.promotion(n).slot for n in range(HELD, len(WORD))}
    if computed:
        keep(served.world.host, SPOKEN[: (HELD + 1) * BLOCK_BYTES])
    served.streamed.over()
    assert served.waited == computed
    assert served.waited or read_to <= set(served.pinned)
    served.world.settle()
