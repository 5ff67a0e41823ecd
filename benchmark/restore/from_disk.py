"""A history on disk: written once as a server does, read back as a prefetch does."""

from __future__ import annotations

import time

from benchmark.restore.engine import History, Stored
from sglang_hc.store.block_io import WRITE_QUEUE
from sglang_hc.store.disk import Block
from sglang_hc.store.outcome import Outcome

PATIENCE = 600.0


class OnDisk:
    """The blocks of `stored`, which was made with a directory. The directory is the caller's."""

    def __init__(self, stored: Stored, history: History) -> None:
        assert stored.blocks is not None
        self._blocks = stored.blocks
        parent = history.host.tree.root(None).block_id
        waiting = 0
        for position, node in enumerate(history.nodes):
            block = Block(node.block_id, parent, "", position, node.tokens)
            while waiting == WRITE_QUEUE:
                waiting -= self._answers()
            self._blocks.write(position, block, node.slot, time.monotonic() + PATIENCE)
            waiting += 1
            parent = node.block_id
        self._finish(waiting)

    def read(self, history: History, blocks: int) -> None:
        """The first so many blocks into the slots of a history."""
        nodes = history.nodes[:blocks]
        for ticket, node in enumerate(nodes):
            self._blocks.read(ticket, node.block_id, node.slot, time.monotonic() + PATIENCE)
        self._finish(len(nodes))

    def _finish(self, waiting: int) -> None:
        while waiting:
            waiting -= self._answers()

    def _answers(self) -> int:
        done = self._blocks.poll()
        assert all(answer.outcome in (Outcome.OK, Outcome.DUPLICATE) for answer in done), done
        if not done:
            time.sleep(0.0002)
        return len(done)
