"""Which part of a prompt is left out when a conversation outgrows the context window.

The cut is a step function of the prompt's length (AttentionStore section 3.4 cuts the oldest half):

    kept = tokens[:head] + tokens[head + dropped:]

`dropped` grows in steps of many blocks. Between two steps every turn of a conversation repeats the
same cut and extends what the turn before left in the tiers. Cutting a little in each turn would
change every block behind the head each time. The head is always kept: without the first tokens the
quality of the answers collapses, because the model's attention leans on them.

Pure: lengths in, lengths out.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_hc.forms import BLOCK_TOKENS


class CannotCut(ValueError):
    """A prompt that cannot be cut so that it fits. The message is for users."""


@dataclass(frozen=True)
class Cut:
    """Tokens [head, head + dropped) of a prompt are left out; both are whole blocks."""

    head: int
    dropped: int


@dataclass(frozen=True)
class OverflowRule:
    """How a server cuts.

    window: most tokens that prompt and answer may have together. keep_first: tokens of the head at
    least. drop: share of what is behind the head that one step drops, in (0, 1). reserve: tokens
    that are left for the answer at least.
    """

    window: int
    keep_first: int
    drop: float
    reserve: int

    @property
    def can_cut(self) -> bool:
        """Whether the window has room for the head, a block behind it, one step and the reserve."""
        head = _blocks_up(max(BLOCK_TOKENS, self.keep_first))
        return self._leaves_room(head, self.window - self.reserve)

    def cut(self, length: int, answer: int | None, keep_first: int | None = None) -> Cut:
        """The cut of a prompt of `length` tokens whose answer may have `answer` tokens.

        None for an answer of any length. keep_first: a request's own head; constant over the turns
        of a conversation, or its state is not found. Raises CannotCut when head, one block and
        the answer do not fit into the window.
        """
        head = _blocks_up(max(BLOCK_TOKENS, keep_first or self.keep_first))
        room = max(self.reserve, answer or 0)
        limit = self.window - room
        step = self._step(head)
        if length <= limit:
            return Cut(head, 0)
        if not self._leaves_room(head, limit):
            raise CannotCut(
                f"a prompt of {length} tokens is cut to a head of {head} tokens and its end, and "
                f"with {room} tokens for the answer too little of the window of {self.window} is "
                "left; ask for fewer new tokens or keep a smaller head"
            )
        return Cut(head, step * -(-(length - limit) // step))

    def earlier(self, cut: Cut) -> list[int]:
        """Tokens that earlier turns dropped, the latest turn's first: as far back as the window
        reaches from the end of the present cut, what is kept of it cannot be older."""
        every = range(0, cut.dropped, self._step(cut.head))
        return [n for n in every if cut.dropped - n <= self.window][::-1]

    def _leaves_room(self, head: int, limit: int) -> bool:
        step = self._step(head)
        return step >= BLOCK_TOKENS and limit - step >= head + BLOCK_TOKENS

    def _step(self, head: int) -> int:
        """Tokens that are dropped at a time."""
        return _blocks_down(self.drop * (self.window - self.reserve - head))


def _blocks_up(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def _blocks_down(tokens: float) -> int:
    return int(tokens) // BLOCK_TOKENS * BLOCK_TOKENS
