"""States of recurrent layers on their way from the device into end parts.

A state is kept where a path is to be continued: behind the last token of a block that the host tier
has. All layers of a state leave the device together, in copies beside the computation.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from sglang_hc.capture.direct import DirectRows
from sglang_hc.capture.snapshots import Fill
from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.ends import Stay
from sglang_hc.store.executor import RowSpan
from sglang_hc.store.scatter_queue import ScatterQueue
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix


class StateCapture:
    """Belongs to the scheduler thread, on the compute stream. `counters` tells what was kept, and
    why the rest was not."""

    def __init__(
        self, host: HostTier, ends: Ends, rows: DirectRows, scatters: ScatterQueue
    ) -> None:
        """rows: into the STATE chunks of end parts."""
        self._host = host
        self._ends = ends
        self._rows = rows
        self._scatters = scatters
        self.counters: Counter[str] = Counter()

    def wants(self, path: Prefix, stay: Stay) -> bool:
        """Whether a state behind this path can be kept, and is not. Counts why not."""
        if path.num_tokens % BLOCK_TOKENS or not path.num_tokens:
            self.counters["ends_inside_blocks"] += 1
            return False
        match = self._host.tree.match(path)
        if match.tokens < path.num_tokens:
            self.counters["ends_without_blocks"] += 1
            return False
        if self._ends.has(match.nodes[-1]):
            self._ends.begin(match.nodes, stay=stay)  # it is worth its bytes that long, too
            return False
        return True

    def keep(self, path: Prefix, read: Fill, stay: Stay) -> None:
        """The state behind a path that `wants` was true for, which `read` gives as one row. stay:
        how long it is worth its bytes."""
        parts = self._ends.begin(self._host.tree.match(path).nodes, stay=stay)
        if parts is None:
            self.counters["ends_without_room"] += 1
            return
        for part in parts:
            try:
                self._rows.add(0, 1, read, [RowSpan(0, part.slot, 0, 1)])
            except Exception:  # such as device memory that a copy lacks
                self._scatters.last().then(partial(self._ends.failed, part))
                raise
            self._scatters.last().then(partial(self._ends.written, part))
            self.counters["kept_ends"] += 1
