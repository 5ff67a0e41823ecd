"""A history on disk: written once through the server's store, read back as a prefetch does."""

from __future__ import annotations

import time

from engine import Stored

from sglang_hc.store.block_io import DiskThreads
from sglang_hc.store.disk import Block, DirectorySpec, DiskStore
from sglang_hc.store.outcome import Outcome

PATIENCE = 600.0


class OnDisk:
    """The blocks of `stored` in a directory. The directory is the caller's to delete."""

    def __init__(self, stored: Stored, directory: str) -> None:
        self._stored = stored
        spec = DirectorySpec(directory, int(1.5 * stored.pool.bytes.nbytes) + (1 << 30))
        layout = stored.layout
        store = DiskStore.open([spec], layout.chunks(), stored.host.tree.fingerprint, "restore")
        self._io = DiskThreads(store, stored.pool)
        parent = stored.host.tree.root(None).block_id
        waiting = 0
        for position, node in enumerate(stored.nodes):
            block = Block(node.block_id, parent, "", position, node.tokens)
            while not self._io.write(position, block, node.slot, time.monotonic() + PATIENCE):
                waiting -= self._answers()
            waiting += 1
            parent = node.block_id
        self._finish(waiting)

    def read(self, blocks: int) -> None:
        """The first so many blocks into the slots they came from."""
        nodes = self._stored.nodes[:blocks]
        for ticket, node in enumerate(nodes):
            self._io.read(ticket, node.block_id, node.slot, time.monotonic() + PATIENCE)
        self._finish(len(nodes))

    def close(self) -> None:
        self._io.close()

    def _finish(self, waiting: int) -> None:
        while waiting:
            waiting -= self._answers()

    def _answers(self) -> int:
        done = self._io.poll()
        assert all(answer.outcome in (Outcome.OK, Outcome.DUPLICATE) for answer in done), done
        if not done:
            time.sleep(0.0002)
        return len(done)
