"""Requests of a simulation and their tokens: histories, cuts, block identities."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from sglang_hc.config import FLAGS, HcConfig
from sglang_hc.policy.overflow import CannotCut, OverflowRule
from sglang_hc.tools.workloads.sessions import Session
from sglang_hc.tree.identity import (
    BLOCK_BYTES,
    TOKEN_BYTES,
    BlockPath,
    Prefix,
    block_id,
    block_ids,
    root_id,
)

FINGERPRINT = b"sglang-hc simulator"[:16]
ROOT = root_id(FINGERPRINT, None)
OVERFLOW_MODES = FLAGS["overflow"].choices or ()


@dataclass
class Job:
    """One request.

    prompt: packed tokens. chain: identities of its full blocks. needs: the chain, and the tail that
    the turn before has left behind, if any. known_tokens: leading tokens of which the turn before
    has left the state. output: packed answer, which calls this tool.
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
    calls: str = ""

    @property
    def path(self) -> BlockPath:
        return BlockPath(Prefix(None, self.prompt), self.chain)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def output_tokens(self) -> int:
        return len(self.output) // TOKEN_BYTES


def extend_chain(chain: list[bytes], tokens: bytes) -> list[bytes]:
    """Identities of the full blocks of `tokens`, given those of a prefix of it."""
    parent = chain[-1] if chain else ROOT
    return chain + block_ids(FINGERPRINT, parent, tokens[len(chain) * BLOCK_BYTES :])


def tail_identity(chain: list[bytes], tokens: bytes) -> bytes | None:
    """Identity of the partial last block of `tokens`; None if there is none."""
    rest = tokens[len(chain) * BLOCK_BYTES :]
    if not rest:
        return None
    return block_id(FINGERPRINT, chain[-1] if chain else ROOT, rest)


@dataclass(frozen=True)
class Overflow:
    """What happens to prompts that outgrow the context window, as by `--hc-overflow` of the server.

    mode: one of OVERFLOW_MODES. window: tokens of prompt and answer. Head and step are the server's
    defaults; a cut leaves a quarter of the window free, which is what an answer has at most.
    """

    mode: str
    window: int

    @property
    def answer(self) -> int:
        """Tokens that an answer has at most."""
        return self.window // 4

    @cached_property
    def _rule(self) -> OverflowRule:
        defaults = HcConfig()
        keep_first, drop = defaults.overflow_keep_first, defaults.overflow_drop
        return OverflowRule(self.window, keep_first, drop, self.answer)

    def kept(self, tokens: bytes, length: int, answer: int) -> bytes | None:
        """What a prompt of `length` tokens keeps of its first ones, packed `tokens`.

        None where the server would answer with an error. answer: tokens that were asked for.
        """
        if self.mode == "off":
            return tokens if length + answer <= self.window else None
        try:
            cut = self._rule.cut(length, None)
        except CannotCut:
            return None
        head, end = cut.head * TOKEN_BYTES, (cut.head + cut.dropped) * TOKEN_BYTES
        return tokens[:head] + tokens[end:] if cut.dropped else tokens


@dataclass
class Conversation:
    """A session in progress: what its next request looks like.

    history: packed tokens of all that was said. known: those whose state the last turn has left, as
    the model saw them. chain: the full blocks of `known`.
    """

    index: int
    session: Session
    overflow: Overflow
    turn: int = 0
    history: bytes = b""
    known: bytes = b""
    chain: list[bytes] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.turn >= len(self.session.turns)

    def next_job(self, number: int) -> Job:
        """The request of the current turn; prompt and answer fit the context window.

        Where the server would answer with an error, the client makes the prompt fit: it drops the
        oldest tokens of a conversation, in each turn anew, and the newest of a whole prompt.
        """
        turn = self.session.turns[self.turn]
        said, wanted = self._said(), turn.answer
        answer = min(wanted.length, self.overflow.answer)
        prompt = self.overflow.kept(said, len(said) // TOKEN_BYTES, answer)
        if prompt is None:
            room = (self.overflow.window - answer) * TOKEN_BYTES
            prompt = said[:room] if self.session.whole else said[-room:]
        goes_on = prompt.startswith(self.known)
        chain = extend_chain(self.chain if goes_on else [], prompt)
        tail = tail_identity(self.chain, self.known) if goes_on else None
        needs = list(chain) if tail is None else [*chain, tail]
        output = wanted.packed[: answer * TOKEN_BYTES]
        known_tokens = len(self.known) // TOKEN_BYTES if goes_on else 0
        return Job(
            number,
            self.index,
            self.turn,
            prompt,
            chain,
            needs,
            output,
            known_tokens=known_tokens,
            calls=turn.calls,
        )

    def answered(self, job: Job) -> None:
        """The turn is over: `known` is what it leaves.

        With `reembed` its state moves at once if the next turn is cut further. A server moves it
        when that turn arrives, and then has as much of it as the tiers have kept: which is as much
        as they keep of the moved one here.
        """
        self.history = self._said() + job.output
        self.known = job.prompt + job.output
        self.turn += 1
        if self.overflow.mode == "reembed" and not self.session.whole and not self.done:
            length = len(self.history) // TOKEN_BYTES + self.session.turns[self.turn].new_tokens
            moved = self.overflow.kept(self.history, length, self.overflow.answer)
            self.known = self.known if moved is None else moved
        self.chain = extend_chain(
            job.chain if self.known.startswith(job.prompt) else [], self.known
        )

    def _said(self) -> bytes:
        """All that the client would send in the current turn."""
        asked = b"".join(part.packed for part in self.session.turns[self.turn].said)
        return asked if self.session.whole else self.history + asked
