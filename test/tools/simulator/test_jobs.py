"""Requests of a simulation: identities as in the tree, and prompts that fit the context window."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tools.simulator.jobs import (
    FINGERPRINT,
    Conversation,
    extend_chain,
    pack_span,
    tail_identity,
)
from sglang_hc.tools.simulator.workloads import TOKEN_IDS, Session, Span, Turn
from sglang_hc.tree.block_tree import BLOCK_BYTES, BlockTree
from sglang_hc.tree.identity import pack_tokens


def test_spans_pack_like_token_ids():
    assert pack_span(Span(7, 3)) == pack_tokens([7, 8, 9])
    assert pack_span(Span(TOKEN_IDS - 1, 2)) == pack_tokens([TOKEN_IDS - 1, 0])


def test_identities_are_those_of_the_tree():
    tree = BlockTree(FINGERPRINT)
    tokens = pack_span(Span(5, 200))
    node, ids = tree.root(None), []
    for start in range(0, len(tokens), BLOCK_BYTES):
        node = tree.insert(node, tokens[start : start + BLOCK_BYTES]).node
        ids.append(node.block_id)
    chain = extend_chain([], tokens)
    assert chain == ids[:-1]
    assert tail_identity(chain, tokens) == ids[-1]
    assert extend_chain(chain[:1], tokens) == chain


lengths = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 700)), min_size=1, max_size=12)


@given(lengths, st.sampled_from([128, 256, 512, 1024]))
def test_every_turn_fits_the_window_and_continues_what_was_kept(pairs, context):
    turns, start = [], 0
    for asked, answered in pairs:
        turns.append(Turn((Span(start, asked),), Span(start + asked, answered)))
        start += asked + answered
    talk = Conversation(0, Session(0.0, tuple(turns)), context)
    number = 0
    while not talk.done:
        kept = talk.history
        job = talk.next_job(number)
        assert job.prompt_tokens + job.output_tokens <= context
        assert job.prompt.startswith(kept[: len(job.prompt)])
        assert job.prompt_tokens >= 1
        assert job.chain == extend_chain([], job.prompt)
        before = job.prompt + job.output
        cut = talk.answered(job)
        assert cut % 64 == 0 or not talk.history
        assert before.endswith(talk.history) and len(before) - len(talk.history) == 4 * cut
        number += 1
    assert number == len(pairs)
