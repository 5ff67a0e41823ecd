"""Where ends are made, and what conversations of ten turns with tools compute again for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.ends.chats import grid, ours, talk
from sglang_hc.forms import BLOCK_TOKENS, EndLayout, StateLayers, WindowLayers
from sglang_hc.policy.ends import Place, Stay, ends_wanted

WINDOW = EndLayout(window=WindowLayers((1, 3), 2 * BLOCK_TOKENS, (1024, 1024)))
STATE = EndLayout(state=StateLayers((0, 1, 2), (1 << 16,), ("float32",)))


@pytest.mark.parametrize(
    ("prompt", "kept", "shared", "places"),
    [
        (1000, 1000, 0, [(15, Stay.PROMPT)]),
        (1000, 1100, 0, [(15, Stay.PROMPT), (17, Stay.REPLY)]),
        (1000, 1100, 640, [(10, Stay.SHARED), (15, Stay.PROMPT), (17, Stay.REPLY)]),
        (1000, 1010, 960, [(15, Stay.SHARED)]),
        (1000, 500, 0, [(7, Stay.REPLY)]),
        (63, 63, 0, []),
    ],
)
def test_ends_lie_where_conversations_come_back(
    prompt: int, kept: int, shared: int, places: list[tuple[int, Stay]]
) -> None:
    assert ends_wanted(prompt, kept, shared) == [Place(*place) for place in places]


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_no_end_lies_behind_what_is_kept(prompt: int, kept: int, shared: int) -> None:
    blocks = [place.blocks for place in ends_wanted(prompt, kept, shared)]
    assert blocks == sorted(set(blocks)) and all(0 < b * BLOCK_TOKENS <= kept for b in blocks)
    assert kept < BLOCK_TOKENS or blocks[-1] == kept // BLOCK_TOKENS


@pytest.mark.parametrize("layout", [WINDOW, STATE])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_turn_computes_less_than_a_block_again(layout: EndLayout, thinks: bool) -> None:
    """With room for four ends of each conversation, of the dozens that its requests make; a grid
    with that room is worse, and so is one of any size with room for all."""
    found = talk(layout, ours, 4, thinks=thinks)
    few = 4 if thinks else 0  # first turns, before any conversation was seen to leave its reply
    again = sorted(found.again)[: len(found.again) - few]
    assert len(again) > 100 and max(again) < BLOCK_TOKENS and max(found.again) < 512
    fine, coarse = (talk(layout, grid(step), None, thinks=thinks) for step in (256, 2048))
    assert max(fine.again) > 192 and max(coarse.again) > 1536
    assert sum(fine.again) > 3 * sum(found.again) and sum(coarse.again) > 20 * sum(found.again)
    assert found.end_bytes < coarse.end_bytes < fine.end_bytes


def test_keeping_the_state_of_every_block_saves_no_token_and_takes_fifty_times_the_bytes() -> None:
    found, every = (
        talk(STATE, places, room, thinks=False) for places, room in ((ours, 4), (grid(64), None))
    )
    assert sum(every.again) == sum(found.again)
    assert every.end_bytes > 50 * found.end_bytes


def test_two_ends_are_enough_for_a_conversation_that_goes_on_behind_its_replies() -> None:
    assert max(talk(STATE, ours, 2, thinks=False).again) < BLOCK_TOKENS
