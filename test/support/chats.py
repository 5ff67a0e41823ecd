"""Conversations of many turns with tools, over a host tier whose paths need ends to be continued.

Nothing is computed: a request goes on behind the last end that its prompt reaches, and what it has
computed and replied is kept, with ends where a `Places` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sglang_hc.forms import BLOCK_TOKENS, EndLayout
from sglang_hc.policy.ends import Place, Stay, ends_wanted
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.identity import TOKEN_BYTES, Prefix, pack_tokens
from support.host import host_tier, keep

Places = Callable[[int, int, int, int], list[Place]]
"""Where ends are made, given the tokens that a request began behind, those of its prompt, those of
prompt and reply, and those that it shares with another path."""


def ours(start: int, prompt: int, kept: int, shared: int) -> list[Place]:
    return ends_wanted(prompt, kept, shared)


def grid(step: int) -> Places:
    """An end at every multiple of `step` tokens that a request passes."""

    def places(start: int, prompt: int, kept: int, shared: int) -> list[Place]:
        first = start // step + 1
        return [Place(n * step // BLOCK_TOKENS, Stay.REPLY) for n in range(first, kept // step + 1)]

    return places


@dataclass(frozen=True)
class Request:
    """kept: prompt and reply. turn: of its conversation."""

    turn: int
    prompt: list[int]
    kept: list[int]


def chat(seed: int, system: list[int], *, thinks: bool, turns: int = 10) -> Iterator[Request]:
    """A conversation: each turn has a question, up to three calls of tools, and an answer. thinks:
    before each reply, in words that stay in the prompt until the turn is over."""
    rng = random.Random(seed)

    def words(low: int, high: int) -> list[int]:
        return [rng.randrange(1000, 1 << 30) for _ in range(rng.randint(low, high))]

    history, header = list(system), [1, 2, 3]
    for turn in range(turns):
        history += words(20, 400)
        said: list[tuple[list[int], list[int]]] = []  # (thought, what stays) of this turn
        calls = rng.randint(0, 3)
        for call in range(calls + 1):
            thought = words(50, 700) if thinks else []
            spoken = words(20, 80) if call < calls else words(50, 500)
            prompt = history + [token for part in said for both in part for token in both] + header
            yield Request(turn, prompt, prompt + thought + spoken)
            result = words(50, 1200) if call < calls else []
            said.append((header + thought, spoken + result))
        for _, stays in said:
            history += header + stays


@dataclass
class Server:
    """Where the requests of all conversations come. end_slots: of end parts; None for enough."""

    layout: EndLayout
    places: Places
    end_slots: int = 1 << 16
    blocks: int = 1 << 16
    known: dict[int, list[bytes]] = field(default_factory=dict)
    computed: int = 0
    """Tokens of prompts."""

    def __post_init__(self) -> None:
        self.host = host_tier(self.blocks)
        self.ends = Ends(self.layout, self.end_slots, self.host, LruPolicy())

    @property
    def end_bytes(self) -> int:
        """Of all ends that are kept."""
        return (self.end_slots - self.ends.free_slots) * self.layout.slot_bytes

    def serve(self, conversation: int, request: Request) -> int | None:
        """Returns how many tokens of the prompt were computed that an earlier request of the
        conversation had computed; None where there was none."""
        prompt, kept = pack_tokens(request.prompt), pack_tokens(request.kept)
        match = self.host.tree.match(Prefix(None, prompt))
        whole = list(match.nodes[: match.tokens // BLOCK_TOKENS])
        deepest = self.ends.deepest(whole)
        if deepest:
            self.ends.used(whole[deepest - 1])
        branches = bool(whole) and bool(whole[-1].children)
        shared = len(whole) * BLOCK_TOKENS if branches else 0
        keep(self.host, kept)
        start = deepest * BLOCK_TOKENS
        nodes = list(self.host.tree.match(Prefix(None, kept)).nodes)
        for count, stay in self.places(start, len(request.prompt), len(request.kept), shared):
            if count > deepest:
                for part in self.ends.begin(nodes[:count], stay=stay) or ():
                    self.ends.written(part)
        before = self.known.setdefault(conversation, [])
        said = max((common_tokens(prompt, other) for other in before), default=0)
        before.append(kept)
        self.computed += len(prompt) // TOKEN_BYTES - start
        return max(0, said - start) if said else None
