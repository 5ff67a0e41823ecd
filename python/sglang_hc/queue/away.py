"""Which session a request goes on with, and what its answer leaves: the requests of a server as
`policy.pauses` and `policy.learned` want to be told of them.

Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.learned import LearnedPolicy
from sglang_hc.policy.pauses import Away, Kind, Pauses
from sglang_hc.queue.requests import Serial
from sglang_hc.tree.block_tree import BlockNode, BlockTree
from sglang_hc.tree.cuts import base_namespace
from sglang_hc.tree.identity import Prefix


class AwaySessions:
    """Of one host tier."""

    def __init__(
        self,
        pauses: Pauses,
        policy: LearnedPolicy[BlockNode],
        tree: BlockTree,
        clock: Callable[[], float],
    ) -> None:
        self.pauses = pauses
        self._policy = policy
        self._tree = tree
        self.clock = clock
        self._served: dict[Serial, Away] = {}

    def came(self, request: Serial, needs: Sequence[bytes]) -> bool:
        """A request waits. needs: the blocks that it can use, root first. Only the first call for
        a request counts. Returns whether a session came back with it."""
        if request in self._served:
            return False
        session = self.pauses.came(needs, self.clock())
        self._served[request] = session
        self._policy.serve(session, needs)
        return session.turns > 0

    def answered(self, request: Serial, kept: Prefix, prompt_tokens: int, tool: str) -> None:
        """A request is over. kept: what is kept of it. tool: that its answer calls; empty for
        none."""
        before = self._served.pop(request, None)
        match = self._tree.match(kept)
        nodes, whole = match.nodes, match.tokens // BLOCK_TOKENS
        if not whole:
            return
        ends = {nodes[whole - 1].block_id: None}
        if 0 < prompt_tokens // BLOCK_TOKENS <= whole:
            ends[nodes[prompt_tokens // BLOCK_TOKENS - 1].block_id] = None
        turns = 0 if before is None else before.turns
        kind = Kind(base_namespace(kept.namespace), tool, turns + 1)
        session = self.pauses.left(kind, list(ends), self.clock(), before)
        self._policy.own(session, [node.block_id for node in nodes])

    def gone(self, request: Serial) -> None:
        """A request waits and runs no more, answered or not; nor is it queued again."""
        self._served.pop(request, None)

    def lose_sight(self) -> None:
        """The state of all sessions is of other weights from now on, what runs included."""
        self.pauses.lose_sight()
        self._served.clear()

    def upkeep(self) -> None:
        """Time has passed. Called in every pass."""
        self.pauses.advance(self.clock())
