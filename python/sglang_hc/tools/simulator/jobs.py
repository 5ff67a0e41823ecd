"""Requests of a simulation and their tokens: histories, truncation, block identities."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tools.simulator.workloads import TOKEN_IDS, Session, Span, Turn
from sglang_hc.tree.block_tree import BLOCK_BYTES
from sglang_hc.tree.identity import TOKEN_BYTES, block_id, root_id

FINGERPRINT = b"sglang-hc simulator"[:16]
ROOT = root_id(FINGERPRINT, None)


def pack_span(span: Span) -> bytes:
    """Token ids of a span, packed as the tree wants them."""
    start = span.start % TOKEN_IDS
    ids = np.arange(start, start + span.length, dtype=np.int64)
    return (ids % TOKEN_IDS).astype(">i4").tobytes()


@dataclass
class Job:
    """One request.

    prompt: packed tokens. chain: identities of its full blocks. needs: the chain, and the tail that
    the turn before has left behind, if any. known_tokens: of the conversation before this turn.
    output: packed answer.
    """

    number: int
    session: int
    turn: int
    prompt: bytes
    chain: list[bytes]
    needs: list[bytes]
    output: bytes
    arrived: float = 0.0
    known_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def output_tokens(self) -> int:
        return len(self.output) // TOKEN_BYTES


def extend_chain(chain: list[bytes], tokens: bytes) -> list[bytes]:
    """Identities of the full blocks of `tokens`, given those of a prefix of it."""
    out = list(chain)
    parent = out[-1] if out else ROOT
    for start in range(len(out) * BLOCK_BYTES, len(tokens) - BLOCK_BYTES + 1, BLOCK_BYTES):
        parent = block_id(FINGERPRINT, parent, tokens[start : start + BLOCK_BYTES])
        out.append(parent)
    return out


def tail_identity(chain: list[bytes], tokens: bytes) -> bytes | None:
    """Identity of the partial last block of `tokens`; None if there is none."""
    rest = tokens[len(chain) * BLOCK_BYTES :]
    if not rest:
        return None
    return block_id(FINGERPRINT, chain[-1] if chain else ROOT, rest)


@dataclass
class Conversation:
    """A session in progress: what its next request looks like.

    history: packed tokens so far, after truncation. chain: its full blocks.
    """

    index: int
    session: Session
    context: int
    turn: int = 0
    history: bytes = b""
    chain: list[bytes] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.turn >= len(self.session.turns)

    def next_job(self, number: int) -> Job:
        """The request of the current turn; prompt and answer fit the context window."""
        turn = self.session.turns[self.turn]
        answer = pack_span(Span(turn.output.start, self._answer_tokens(turn)))
        asked = b"".join(pack_span(span) for span in turn.spans)
        limit = (self.context - len(answer) // TOKEN_BYTES) * TOKEN_BYTES
        if self.session.whole:
            prompt, known = asked[:limit], []
        else:
            prompt, known = (self.history + asked)[:limit], self.chain
        chain = extend_chain(known, prompt)
        needs = list(chain)
        tail = None if self.session.whole else tail_identity(self.chain, self.history)
        if tail is not None:
            needs.append(tail)
        job = Job(number, self.index, self.turn, prompt, chain, needs, answer)
        job.known_tokens = 0 if self.session.whole else len(self.history) // TOKEN_BYTES
        return job

    def answered(self, job: Job) -> int:
        """Append the answer. Returns the tokens cut from the front so that the next turn fits.

        AttentionStore sections 3.4 and 4.1: an overflow drops the earlier half of the history, here
        in whole blocks, and again until it fits. The cut is made as soon as the turn ends, while
        all state is on the device.
        """
        self.turn += 1
        self.history = job.prompt + job.output
        total = kept = len(self.history) // TOKEN_BYTES
        if not self.session.whole and not self.done:
            following = self.session.turns[self.turn]
            coming = following.new_tokens + self._answer_tokens(following)
            while kept and kept + coming > self.context:
                kept = total - -(-(total - kept // 2) // BLOCK_TOKENS) * BLOCK_TOKENS
                kept = max(kept, 0)
        cut = total - kept
        self.history = self.history[cut * TOKEN_BYTES :]
        self.chain = extend_chain([] if cut else job.chain, self.history)
        return cut

    def _answer_tokens(self, turn: Turn) -> int:
        """An answer is cut at a quarter of the window, so that its prompt has room."""
        return min(turn.output.length, self.context // 4)
