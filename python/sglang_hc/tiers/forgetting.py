"""Forgetting: namespaces leave the device, host memory and what is below, and do not come back.

The device and host memory forget at once. What a running request still reads stays where it is,
under a name that no request has, and nothing that such a request leaves is kept. Then the disk is
erased, which may take long, while everybody is served. When that is done, whatever came to the
device and host memory meanwhile is forgotten once more, and only then the answer is given.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sglang_hc.store.block_io import BlockDone
from sglang_hc.store.lower_tier import LowerTier
from sglang_hc.store.outcome import Outcome
from sglang_hc.tree.forgetting import FORGOTTEN, Forgetting

Answer = dict[str, Any]
"""To one client: an HTTP `status`, what each tier had, and whether it is gone."""

_LEFT = {
    "disk": "the disk tier could not erase everything; see the server's log, and repeat the call",
    "remote": "the remote store could not erase everything; see the server's log, and repeat the "
    "call",
}
_NO_NAMESPACES = (
    "the remote store knows no namespaces: blocks that this server does not know by name may stay "
    "there; clear it with /hicache/storage-backend/clear"
)
_NO_DELETE = "the remote store can delete no single block; clear it with " + (
    "/hicache/storage-backend/clear"
)


ForgetAbove = Callable[[Forgetting, str], tuple[int, list[bytes]]]
"""Forgets on the device and in host memory, for which the beginning of namespaces is given that no
request has (`hidden_namespace`). Returns the tokens and the blocks that were there."""


class Forgetter:
    """What is being forgotten below the device. Belongs to the scheduler thread."""

    def __init__(self, disk: LowerTier | None) -> None:
        self._disk = disk
        self._under_way: list[Forgetting] = []
        self._numbers = itertools.count()

    def covers(self, namespace: str | None) -> bool:
        """Whether what a request of this namespace leaves must not be kept."""
        if namespace is not None and namespace.startswith(FORGOTTEN):
            return True
        return any(what.names(namespace) for what in self._under_way)

    def forget(
        self, what: Forgetting, above: ForgetAbove, ended: Callable[[Answer], object]
    ) -> None:
        """Forget namespaces in every tier; see the module. ended: told of it, perhaps at once."""
        self._under_way.append(what)
        tokens, block_ids = above(what, self._hidden())

        def below_is_done(done: Sequence[BlockDone]) -> None:
            more, ids = above(what, self._hidden())
            self._under_way.remove(what)
            ended(_answer(tokens + more, len(block_ids) + len(ids), done))

        if self._disk is None:
            below_is_done(())
        else:
            self._disk.erase(what, block_ids, below_is_done)

    def clear(self, ended: Callable[[bool], object]) -> bool:
        """Erase everything below host memory, for all namespaces of this model. ended: told whether
        all of it is gone. False, and nothing happens: there is nothing that is ours."""
        if self._disk is None:
            return False
        self._disk.erase(
            None, (), lambda done: ended(all(one.outcome is Outcome.OK for one in done))
        )
        return True

    def _hidden(self) -> str:
        """How namespaces begin that no request has."""
        return f"{FORGOTTEN}{next(self._numbers)}"


def _answer(tokens: int, blocks: int, done: Sequence[BlockDone]) -> Answer:
    answer: Answer = {"status": 200, "device": {"tokens": tokens}, "host": {"blocks": blocks}}
    missed = []
    for one in done:  # of a tier that has end parts too there are two
        complete = one.outcome is Outcome.OK and not one.by_name
        had = answer.setdefault(one.tier, {"blocks": 0, "complete": True})
        had["blocks"] += one.blocks
        had["complete"] &= complete
        if not complete:
            missed.append(_why_left(one))
    return judged(answer, missed)


def _why_left(done: BlockDone) -> str:
    if done.outcome is Outcome.DROPPED:
        return _NO_DELETE
    return _NO_NAMESPACES if done.by_name else _LEFT[done.tier]


def judged(answer: Answer, missed: Sequence[str]) -> Answer:
    answer["complete"] = not missed
    if missed:
        answer["status"], answer["error"] = 503, {"message": "; ".join(missed)}
    return answer
