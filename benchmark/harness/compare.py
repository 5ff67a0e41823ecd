"""Do all arms say the same? Token by token against the reference arm, with the margin of a tie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmark.harness.client import Client
from benchmark.harness.points import Cell
from benchmark.harness.workload import prompt_ids
from sglang_hc.tools.workloads.sessions import Workload

TIE_MARGIN = {"float32": 0.002}
_HALF_TIE_MARGIN = 0.1
"""Largest difference of log probability that rounding explains: recomputed and restored states
differ by float rounding only, so greedy decoding may part where two tokens are this close."""


def tie_margin(dtype: str) -> float:
    """The same of an element type."""
    return TIE_MARGIN.get(dtype, _HALF_TIE_MARGIN)


@dataclass
class Disagreement:
    """The first token of one session at which an arm differs from the reference.

    prompt: ids before that token, the reference's replies included. margin: log probability of
    the reference's token minus that of the arm's token, on the reference server; None when it
    could not be asked.
    """

    arm: str
    point: str
    repeat: int
    session: int
    turn: int
    position: int
    reference_token: int
    arm_token: int
    prompt: list[int]
    margin: float | None = None
    explained: bool = False

    def to_json(self) -> dict[str, Any]:
        """Fields without the prompt, which the seed reproduces."""
        fields = asdict(self)
        fields["prompt_len"] = len(fields.pop("prompt"))
        return fields


@dataclass
class Agreement:
    """Comparison of one arm with the reference.

    compared: replies of the same prompt. equal: replies equal in every token. after: replies
    later in a session than its first disagreement, whose prompts differ and say nothing.
    """

    arm: str
    compared: int
    equal: int
    after: int
    disagreements: list[Disagreement]

    @property
    def verdict(self) -> str:
        """One word or sentence for tables."""
        if not self.compared:
            return "not compared"
        if not self.disagreements:
            return "equal"
        unexplained = sum(not item.explained for item in self.disagreements)
        words = f"{len(self.disagreements)} of {self.compared} differ"
        return f"{words}, {unexplained} unexplained" if unexplained else f"{words}, all near ties"

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "compared": self.compared,
            "equal": self.equal,
            "after": self.after,
            "verdict": self.verdict,
            "disagreements": [item.to_json() for item in self.disagreements],
        }


def compare(
    cells: Sequence[Cell], reference: str, workload_of: Callable[[str, int], Workload]
) -> list[Agreement]:
    """One Agreement for every other arm. `workload_of(point, repeat)` is the workload of a cell.

    Only requests whose token ids came back on both sides are compared.
    """
    by_place = {(cell.arm, cell.point, cell.repeat): cell for cell in cells}
    agreements: dict[str, Agreement] = {}
    for (arm, point, repeat), cell in by_place.items():
        base = by_place.get((reference, point, repeat))
        if arm == reference or base is None:
            continue
        total = agreements.setdefault(arm, Agreement(arm, 0, 0, 0, []))
        _compare_cell(total, base, cell, workload_of(point, repeat))
    return list(agreements.values())


def _compare_cell(total: Agreement, base: Cell, cell: Cell, workload: Workload) -> None:
    expected, got = base.run.outputs(), cell.run.outputs()
    for index, session in enumerate(workload.sessions):
        outputs: list[list[int]] = []
        parted = False
        for number in range(len(session.turns)):
            ours, theirs = got.get((index, number)), expected.get((index, number))
            if ours is None or theirs is None or not (ours.reply.ids and theirs.reply.ids):
                break
            if parted and not session.whole:
                total.after += 1
                continue
            total.compared += 1
            place = _first_difference(theirs.reply.ids, ours.reply.ids)
            if place is None:
                total.equal += 1
            else:
                parted = True
                prompt = prompt_ids(session, number, outputs)
                total.disagreements.append(
                    Disagreement(
                        *(cell.arm, cell.point, cell.repeat, index, number, place),
                        _at(theirs.reply.ids, place),
                        _at(ours.reply.ids, place),
                        prompt + theirs.reply.ids[:place],
                    )
                )
            outputs.append(theirs.reply.ids)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for place, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(ids: Sequence[int], place: int) -> int:
    """Token at `place`, or -1 past the end of a reply that is too short."""
    return ids[place] if place < len(ids) else -1


async def explain(
    client: Client, disagreements: Sequence[Disagreement], dtype: str, limit: int = 50
) -> None:
    """Ask the reference server how close the two tokens were, for the first `limit` items.

    Sets `margin` and `explained` in place. Raises client.RequestFailed.
    """
    bound = tie_margin(dtype)
    for item in disagreements[:limit]:
        if item.arm_token < 0 or item.reference_token < 0:
            continue
        values = await client.logprobs(item.prompt, [item.reference_token, item.arm_token])
        item.margin = values[item.reference_token] - values[item.arm_token]
        item.explained = abs(item.margin) <= bound
