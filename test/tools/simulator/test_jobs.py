"""Requests of a simulation: identities as in the tree, and prompts that fit the context window."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.policy.overflow import CannotCut, OverflowRule
from sglang_hc.tools.simulator.jobs import (
    FINGERPRINT,
    OVERFLOW_MODES,
    Conversation,
    Job,
    Overflow,
    extend_chain,
    tail_identity,
)
from sglang_hc.tools.workloads.sessions import TOKEN_IDS, Session, Span, Turn
from sglang_hc.tree.block_tree import BlockTree
from sglang_hc.tree.identity import BLOCK_BYTES, pack_tokens


def test_spans_pack_like_token_ids():
    assert Span(7, 3).packed == pack_tokens([7, 8, 9])
    assert Span(TOKEN_IDS - 1, 2).packed == pack_tokens([TOKEN_IDS - 1, 0])


def test_identities_are_those_of_the_tree():
    tree = BlockTree(FINGERPRINT)
    tokens = Span(5, 200).packed
    node, ids = tree.root(None), []
    for start in range(0, len(tokens), BLOCK_BYTES):
        node = tree.insert(node, tokens[start : start + BLOCK_BYTES]).node
        ids.append(node.block_id)
    chain = extend_chain([], tokens)
    assert chain == ids[:-1]
    assert tail_identity(chain, tokens) == ids[-1]
    assert extend_chain(chain[:1], tokens) == chain


lengths = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 700)), min_size=1, max_size=12)
windows = st.sampled_from([128, 256, 512, 1024])


def session_of(pairs: list[tuple[int, int]]) -> Session:
    """One turn for each (asked, answered), all of different tokens."""
    turns, start = [], 0
    for asked, answered in pairs:
        turns.append(Turn((Span(start, asked),), Span(start + asked, answered)))
        start += asked + answered
    return Session(0.0, tuple(turns))


def unpack(tokens: bytes) -> list[int]:
    return np.frombuffer(tokens, ">i4").tolist()


def jobs_of(talk: Conversation) -> Iterator[Job]:
    number = 0
    while not talk.done:
        job = talk.next_job(number)
        yield job
        talk.answered(job)
        number += 1


@given(lengths, windows, st.sampled_from(OVERFLOW_MODES))
def test_every_turn_fits_the_window_and_knows_what_is_known(pairs, window, mode):
    talk = Conversation(0, session_of(pairs), Overflow(mode, window))
    said, count = b"", 0
    for job in jobs_of(talk):
        assert talk.history == said
        said += talk.session.turns[count].said[0].packed
        assert job.prompt_tokens >= 1 and job.prompt_tokens + job.output_tokens <= window
        assert job.chain == extend_chain([], job.prompt)
        assert job.prompt[: 4 * job.known_tokens] == talk.known[: 4 * job.known_tokens]
        assert job.known_tokens in (0, len(talk.known) // 4)
        assert said.endswith(job.prompt[-4 * min(job.prompt_tokens, 20) :])
        said += job.output
        count += 1
    assert count == len(pairs)


@given(lengths, windows, st.sampled_from(["recompute", "reembed"]))
def test_prompts_are_cut_by_the_server_s_rule(pairs, window, mode):
    rule = OverflowRule(window, 64, 0.5, window // 4)
    talk = Conversation(0, session_of(pairs), Overflow(mode, window))
    for job in jobs_of(talk):
        said = talk.history + talk.session.turns[job.turn].said[0].packed
        try:
            cut = rule.cut(len(said) // 4, None)
        except CannotCut:
            assert job.prompt == said[-len(job.prompt) :]
            continue
        kept = unpack(said)
        assert unpack(job.prompt) == kept[: cut.head] + kept[cut.head + cut.dropped :]


def test_what_each_mode_finds_of_its_state_after_a_cut():
    """Turns of 60 and 40 tokens in a window of 512 that keeps 128 free: prompts above 384 tokens
    lose 128 at a time, which is half of what is behind the head, in whole blocks."""
    prompts = {}
    for mode in OVERFLOW_MODES:
        talk = Conversation(0, session_of([(60, 40)] * 9), Overflow(mode, 512))
        prompts[mode] = [(job.prompt_tokens, job.known_tokens) for job in jobs_of(talk)]
    whole = [(60, 0), (160, 100), (260, 200), (360, 300)]
    slid = [(512 - 40, 0)] * 4
    assert prompts["off"] == [*whole, (460, 400), *slid]
    cut = [(332, 0), (304, 0), (276, 0), (376, 316), (348, 0)]
    assert prompts["recompute"] == whole + cut
    assert prompts["reembed"] == whole + [(length, length - 60) for length, _ in cut]


def test_a_whole_prompt_that_is_too_long_keeps_its_first_tokens_or_is_cut():
    session = Session(0.0, (Turn((Span(0, 600),), Span(600, 40)),), whole=True)
    asked = Span(0, 600).packed
    kept = {
        mode: Conversation(0, session, Overflow(mode, 512)).next_job(0).prompt
        for mode in OVERFLOW_MODES
    }
    assert kept["off"] == asked[: 4 * 472]
    assert kept["recompute"] == kept["reembed"] == asked[: 4 * 64] + asked[4 * (64 + 256) :]
