"""The sessions of requests: who goes on with which, and what they leave in a tier."""

from __future__ import annotations

from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.learned import LearnedPolicy
from sglang_hc.policy.pauses import Pauses, bucket_of
from sglang_hc.queue.away import AwaySessions
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.queue.requests import QueuedPrompt, Serial
from sglang_hc.tree.identity import Prefix, pack_tokens
from support.clock import Clock
from support.host import host_tier, keep, queue_over
from support.tiers import build


class World:
    """A host tier that keeps whole answers; requests are lists of token ids."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.policy: LearnedPolicy = LearnedPolicy(Pauses(), LookAhead())
        self.tier = host_tier(64, self.policy)
        self.away = AwaySessions(self.policy.pauses, self.policy, self.tier.tree, self.clock)
        self.served = 0

    def serve(
        self, prompt: list[int], answer: list[int], tool: str = "", namespace: str | None = None
    ) -> None:
        request, self.served = Serial(self.served), self.served + 1
        asked = Prefix(namespace, pack_tokens(prompt))
        kept = Prefix(namespace, pack_tokens(prompt + answer))
        self.away.came(request, self.tier.tree.identities(asked))
        keep(self.tier, kept.tokens, namespace, self.clock.now)
        self.away.answered(request, kept, len(prompt), tool)
        self.away.gone(request)
        self.away.pauses.check_integrity()
        self.policy.check_integrity()

    @property
    def kinds(self) -> list[tuple[str | None, str, int]]:
        """Of the sessions that are away."""
        return [tuple(session.kind) for session in self.away.pauses.sessions if session.kind]


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def test_a_session_goes_on_with_its_history_and_with_its_prompt_alone():
    world = World()
    first, answer = tokens(0, 200), tokens(1000, 100)
    world.serve(first, answer, "read")
    world.serve(first + answer + tokens(2000, 70), tokens(3000, 70), "build")
    assert world.kinds == [(None, "build", 2)]
    said = first + answer + tokens(2000, 70)
    world.serve(said + tokens(4000, 100), tokens(5000, 3))
    assert world.kinds == [(None, "", 3)], "the reply was sent back in other words"
    assert world.away.pauses.returned == 2


def test_a_namespace_has_sessions_of_its_own():
    world = World()
    world.serve(tokens(0, 200), [7], "read", "a")
    world.serve(tokens(0, 300), [7], "read", "b")
    (one, *_), (other, *_) = world.kinds
    assert one != other and world.away.pauses.returned == 0


def test_what_is_less_than_a_block_is_no_session():
    world = World()
    world.serve(tokens(0, BLOCK_TOKENS - 2), [7])
    assert not world.kinds


def test_the_time_away_is_that_of_the_clock():
    world = World()
    world.serve(tokens(0, 200), [7], "read")
    world.clock.pass_time(30.0)
    world.away.upkeep()
    (session,) = world.away.pauses.sessions
    assert session.bucket == bucket_of(30.0)


def test_who_was_away_when_the_weights_changed_does_not_count_as_gone_for_good():
    world = World()
    tiers, _, _ = build(LayerPlan(0, 0, 1), slots=64, device_slots=64)
    tiers.queue.away = world.away
    world.serve(tokens(0, 200), [7], "read")
    (session,) = world.away.pauses.sessions
    (count, *_) = [level for level, _ in session.counted]
    world.clock.pass_time(30.0)
    world.away.upkeep()
    tiers.begin_version(lambda namespace: False)
    assert not world.kinds
    world.clock.pass_time(3600.0)
    world.away.upkeep()
    world.away.pauses.check_integrity()
    assert [at for at, weight in enumerate(count.open) if weight] == [bucket_of(30.0)]
    world.serve(tokens(0, 300), [7], "read")
    assert world.kinds == [(None, "read", 1)] and world.away.pauses.returned == 0


def test_who_is_retracted_goes_on_with_its_session():
    """It began a new one, and its session counted as away for ever."""
    world = World()
    world.serve(tokens(0, 200), tokens(1000, 100), "read")
    queue = queue_over(world.tier, None, LookAhead())
    queue.away = world.away
    prompt = tokens(0, 200) + tokens(1000, 100) + tokens(2000, 70)
    asked = Prefix(None, pack_tokens(prompt))
    for generated in (0, 30):
        so_far = Prefix(None, pack_tokens(prompt + tokens(3000, generated)))
        queue.arrived(Serial(9), lambda path=so_far: QueuedPrompt(path, lambda: 0))
        queue.on_schedule_step([Serial(9)])
        queue.on_schedule_step([])
        queue.finished(Serial(9), 6, comes_back=generated == 0)
        if not generated:
            keep(world.tier, asked.tokens)
    assert world.away.pauses.returned == 1 and queue.counters["sessions_back"] == 1
    assert len(world.away.pauses.sessions) == 1
    queue.arrived(Serial(9), lambda: QueuedPrompt(asked, lambda: 0))
    queue.on_schedule_step([Serial(9)])
    assert len(world.away.pauses.sessions) == 2, "the other request of this number is over"
