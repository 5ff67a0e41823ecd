"""Conversations of many turns with tools, over a host tier whose paths need ends to be continued.

Nothing is computed: a request goes on behind the last end that its prompt reaches, and what it has
computed and replied is kept, with ends where a `Places` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hc.forms import BLOCK_TOKENS, EndLayout
from sglang_hc.policy.ends import Place, Stay, ends_wanted
from sglang_hc.policy.eviction import LruPolicy
from sglang_hc.tree.block_tree import BlockNode, BlockTree, common_tokens
from sglang_hc.tree.ends import Ends
from sglang_hc.tree.host_tier import HostTier
from sglang_hc.tree.identity import Prefix, pack_tokens

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

    def __post_init__(self) -> None:
        self.host = HostTier(BlockTree(bytes(16)), self.blocks, LruPolicy())
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
        start, nodes = deepest * BLOCK_TOKENS, self._keep(Prefix(None, kept))
        for count, stay in self.places(start, len(request.prompt), len(request.kept), shared):
            if count > deepest:
                for part in self.ends.begin(nodes[:count], stay=stay) or ():
                    self.ends.written(part)
        before = self.known.setdefault(conversation, [])
        said = max((common_tokens(prompt, other) for other in before), default=0)
        before.append(kept)
        return max(0, said - start) if said else None

    def _keep(self, path: Prefix) -> list[BlockNode]:
        """Whole blocks of a path, which the host tier has now."""
        match = self.host.tree.match(path)
        nodes = list(match.nodes[: match.tokens // BLOCK_TOKENS])
        for number in range(len(nodes), path.num_tokens // BLOCK_TOKENS):
            slot = self.host.stage(0.0)
            assert slot is not None
            parent = nodes[-1] if nodes else self.host.tree.root(path.namespace)
            node = self.host.publish(parent, path.block(number), slot, 0.0).node
            self.host.mark_ready(node)
            nodes.append(node)
        return nodes


class Talked(NamedTuple):
    """again: tokens computed again, of each request that came back. end_bytes: of a conversation,
    when all are over. tokens: of a conversation's longest request."""

    again: list[int]
    end_bytes: int
    tokens: int


def talk(
    layout: EndLayout, places: Places, per_chat: int | None, *, thinks: bool, chats: int = 8
) -> Talked:
    """Conversations that take turns at random, and share what they are told first. per_chat: ends
    for which there is room, of each of them; None for enough."""
    slots = 1 << 15 if per_chat is None else per_chat * chats * layout.blocks
    server = Server(layout, places, slots)
    rng = random.Random(5)
    system = [rng.randrange(1000, 1 << 30) for _ in range(1000)]
    talking = {number: chat(number, system, thinks=thinks) for number in range(chats)}
    again, longest = [], dict.fromkeys(talking, 0)
    while talking:
        number = rng.choice(list(talking))
        request = next(talking[number], None)
        if request is None:
            del talking[number]
            continue
        longest[number] = max(longest[number], len(request.kept))
        more = server.serve(number, request)
        if more is not None:
            again.append(more)
    server.ends.check_integrity()
    return Talked(again, server.end_bytes // chats, sum(longest.values()) // chats)
