"""`learned`: the order of `queue` until pauses are known, and then by what sessions are worth."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.policy.eviction import QueuePolicy
from sglang_hc.policy.learned import LearnedPolicy
from sglang_hc.policy.pauses import EVIDENCE, Kind, Pauses
from sglang_hc.queue.lookahead import LookAhead
from sglang_hc.tree.block_tree import BlockNode
from sglang_hc.tree.identity import Prefix
from support.examples import examples
from support.host import host_tier, identities, keep, tokens_of

SLOTS = 8
READ, BUILD = Kind(None, "read", 1), Kind(None, "build", 1)


class Learned:
    """A host tier under one of both policies. A session is a word, as in `support.host`."""

    def __init__(self, pauses: Pauses | None) -> None:
        self.window = LookAhead()
        self.pauses = pauses
        self.policy: QueuePolicy[BlockNode] = (
            QueuePolicy(self.window) if pauses is None else LearnedPolicy(pauses, self.window)
        )
        self.tier = host_tier(SLOTS, self.policy)

    def pass_time(self, now: float) -> None:
        if self.pauses is not None:
            self.pauses.advance(now)

    def serve(self, word: str, kind: Kind, now: float) -> None:
        """A request with this prompt runs to its end, and its session is away."""
        tokens, path = tokens_of(word), identities(tokens_of(word))
        self.pass_time(now)
        before = None
        if self.pauses is not None:
            assert isinstance(self.policy, LearnedPolicy)
            before = self.pauses.came(path, now)
            self.policy.serve(before, path)
        keep(self.tier, tokens, now=now)
        self.tier.access(self.tier.tree.match(Prefix(None, tokens)).nodes, now)
        if self.pauses is not None:
            assert isinstance(self.policy, LearnedPolicy)
            session = self.pauses.left(kind, path[-1:], now, before)
            self.policy.own(session, path)

    def wait_for(self, words: list[str]) -> None:
        self.window.update(words, len(words), lambda word: identities(tokens_of(word)))

    def has(self, word: str) -> int:
        """Blocks of a word that are here."""
        return self.tier.tree.match(Prefix(None, tokens_of(word))).tokens // BLOCK_TOKENS

    @property
    def here(self) -> set[bytes]:
        return {node.block_id for node in self.tier.tree.nodes()}


WORDS = ["a", "ab", "abc", "abd", "b", "ba", "c", "cd", "cde", "e", "f", "fg"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["serve", "serve", "serve", "wait", "evict", "pass"]),
        st.integers(0, 1000),
        st.floats(0.0, 100.0),
    ),
    max_size=60,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_without_evidence_the_order_is_that_of_queue(steps):
    """Also what is learned of loops is the same."""
    learned, queue = Learned(Pauses()), Learned(None)
    now = 0.0
    for action, number, seconds in steps[: EVIDENCE - 1]:
        now += seconds
        for one in (learned, queue):
            if action == "serve":
                one.serve(WORDS[number % len(WORDS)], (READ, BUILD)[number % 2], now)
            elif action == "wait":
                one.wait_for([WORDS[number % len(WORDS)], WORDS[number // 7 % len(WORDS)]][:1])
            elif action == "evict":
                one.tier.evict(number % 3, now)
            else:
                one.pass_time(now)
        assert learned.here == queue.here
    assert learned.pauses is not None and not learned.pauses.is_evident


def taught(host: Learned) -> float:
    """Files are read in a tenth of a second, and builds take 100 s. Returns the time."""
    assert host.pauses is not None
    now = 0.0
    for number in range(EVIDENCE):
        for kind, seconds in ((READ, 0.1), (BUILD, 100.0)):
            host.pauses.left(kind, [number.to_bytes(16, "big")], now)
            now += seconds
            host.pass_time(now)
            host.pauses.came([number.to_bytes(16, "big")], now)
    return now


def test_whoever_should_have_been_back_leaves_before_whoever_is_about_to_be():
    host = Learned(Pauses())
    now = taught(host)
    host.serve("ab", BUILD, now)
    host.serve("cd", READ, now + 50)
    host.pass_time(now + 90)
    host.tier.evict(3, now + 90)
    assert (host.has("ab"), host.has("cd")) == (1, 0), "the younger one leaves, from its end"


def test_while_its_result_is_due_a_short_call_stays():
    host = Learned(Pauses())
    now = taught(host)
    host.serve("cd", READ, now)
    host.serve("ab", BUILD, now)
    host.tier.evict(1, now)
    assert (host.has("ab"), host.has("cd")) == (1, 2)


def test_what_a_waiting_request_needs_stays_whatever_it_is_worth():
    host = Learned(Pauses())
    now = taught(host)
    host.serve("ab", BUILD, now)
    host.serve("cd", READ, now)
    host.wait_for(["ab"])
    host.tier.evict(2, now)
    assert (host.has("ab"), host.has("cd")) == (2, 0)


def test_of_a_shared_front_the_better_session_decides():
    host = Learned(Pauses())
    now = taught(host)
    host.serve("xya", READ, now)
    host.serve("xyb", BUILD, now)
    host.serve("cd", BUILD, now)
    host.tier.evict(3, now)
    assert (host.has("xya"), host.has("xyb"), host.has("cd")) == (3, 2, 0)


@settings(max_examples=examples(100), deadline=None)
@given(STEPS)
def test_with_evidence_only_leaves_leave_and_owners_are_of_blocks_that_are_here(steps):
    host = Learned(Pauses())
    now = taught(host)
    policy = host.policy
    assert isinstance(policy, LearnedPolicy)
    for action, number, seconds in steps:
        now += seconds
        if action == "serve":
            host.serve(WORDS[number % len(WORDS)], (READ, BUILD)[number % 2], now)
        elif action == "wait":
            host.wait_for([WORDS[number % len(WORDS)]])
        elif action == "evict":
            before = len(host.here)
            assert host.tier.evict(number % 3, now) == min(before, number % 3)
        else:
            host.pass_time(now)
        host.tier.check_integrity()
        policy.check_integrity()
        assert len(policy) == host.tier.published_blocks
