"""Images in paths: two paths that agree in their ids agree in what they show."""

from __future__ import annotations

from array import array
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.tree import images
from sglang_hc.tree.block_tree import common_tokens
from sglang_hc.tree.forgetting import Forgetting, Stored
from sglang_hc.tree.identity import BLOCK_BYTES, TOKEN_BYTES, block_ids, pack_tokens
from sglang_hc.tree.images import FIRST_ID, WINDOW, Image, Marks
from support.examples import examples

BIG = 1 << 61
"""As SGLang has it in the place of an image."""

part = st.one_of(
    st.tuples(st.sampled_from("079"), st.sampled_from([1, 3, 58, 59, 60, 61, 62, 63, 64, 70])),
    st.tuples(st.sampled_from("abcdefgh"), st.sampled_from([1, 2, 4, 5, 6, 64, 67, 130])),
)
layout = st.lists(part, min_size=1, max_size=6)


class Path:
    """tokens: SGLang's. truth: what each of them is, which ids must not hide."""

    def __init__(self, parts: list[tuple[str, int]]) -> None:
        self.tokens, self.images = array("q"), list[Image]()
        self.truth: list[object] = []
        for what, count in [*parts, ("7", WINDOW)]:
            start = len(self.tokens)
            if what.isdigit():
                self.tokens.extend([int(what)] * count)
                self.truth += [int(what)] * count
            else:
                self.images.append(Image(start, start + count, what.encode() * 16))
                self.tokens.extend([BIG] * count)
                self.truth += [(what, count, place) for place in range(count)]
        self.marks = Marks(self.tokens, self.images)

    @property
    def packed(self) -> bytes:
        return pack_tokens(self.marks.ids(self.tokens))


@given(layout, layout, st.integers(0, 5))
@example([("7", 59), ("a", 5)], [("7", 59), ("0", 1), ("a", 4)], 0)
@settings(max_examples=examples(400), deadline=None)
def test_what_has_equal_ids_shows_the_same(
    first: list[tuple[str, int]], other: list[tuple[str, int]], shared: int
) -> None:
    """With ids of 4 bits, so that a few are often equal by chance; all of a seed is 20."""
    with mock.patch.object(images, "FIRST_ID", 16):
        one, two = Path(first), Path(first[:shared] + other)
        count = common_tokens(one.packed, two.packed)
        for path in (one, two):
            known = path.marks.cut(count)
            assert one.truth[:known] == two.truth[:known]
        whole = count // BLOCK_TOKENS * BLOCK_TOKENS
        assert one.truth[:whole] == two.truth[:whole]


@given(layout)
@settings(max_examples=examples(200), deadline=None)
def test_each_block_of_an_image_says_which(parts: list[tuple[str, int]]) -> None:
    path = Path(parts)
    ids = path.marks.ids(path.tokens)
    for image in path.images:
        block = image.start // BLOCK_TOKENS * BLOCK_TOKENS
        inside = ids[block : block + BLOCK_TOKENS]
        assert len(inside) < BLOCK_TOKENS or sum(one >= FIRST_ID for one in inside) >= WINDOW
        assert min(ids[image.start : image.stop]) >= FIRST_ID
    assert path.marks.cut(len(path.tokens)) == len(path.tokens)
    for end in range(0, len(path.tokens), BLOCK_TOKENS):
        assert path.marks.cut(end) == end


def test_text_before_an_image_is_what_it_is_without() -> None:
    """But for the few tokens that say which image it is, where its block has no room for that."""
    text, here = array("q", range(61)), array("q", [BIG] * 20)
    for before, known in ((61, 59), (60, 59), (59, 59), (58, 58), (3, 3)):
        tokens = text[:before] + here + text
        marks = Marks(tokens, [Image(before, before + 20, b"a" * 16)])
        assert common_tokens(pack_tokens(text), pack_tokens(marks.ids(tokens))) == known
        assert [marks.cut(known + more) for more in range(6)] == [known] * 5 + [known + 5]


@given(layout)
@settings(max_examples=examples(50), deadline=None)
def test_blocks_are_named_by_their_images_however_much_is_asked_for(
    parts: list[tuple[str, int]],
) -> None:
    path = Path(parts)
    for count in (len(path.tokens), len(path.tokens) // 2, 3):
        begun = pack_tokens(path.marks.ids(path.tokens[:count]))
        assert path.packed.startswith(begun) and len(begun) == count * TOKEN_BYTES
    changed = [Image(*one[:2], one.content[:-1] + b"!") for one in path.images]
    ours, theirs = (
        block_ids(b"f" * 16, b"r" * 16, packed)
        for packed in (path.packed, pack_tokens(Marks(path.tokens, changed).ids(path.tokens)))
    )
    first = path.images[0].start // BLOCK_TOKENS if path.images else len(ours)
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])


@pytest.mark.parametrize(
    "tokens, shown",
    [
        ([1] * 9, [Image(2, 2, b"a")]),
        ([1] * 9, [Image(4, 6, b"a"), Image(2, 3, b"a")]),
        ([1] * 9, [Image(2, 5, b"a"), Image(4, 6, b"a")]),
        ([1] * 9, [Image(8, 10, b"a")]),
        ([1] * 68, [Image(64, 66, b"a")]),
        ([FIRST_ID] * 9, []),
        ([-1] * 9, []),
    ],
)
def test_what_cannot_be_told_is_refused(tokens: list[int], shown: list[Image]) -> None:
    with pytest.raises(ValueError):
        Marks(tokens, shown)


@given(layout, st.integers(1, 80))
@settings(max_examples=examples(200), deadline=None)
def test_a_prefix_that_is_forgotten_takes_the_images_behind_it_with_it(
    parts: list[tuple[str, int]], length: int
) -> None:
    """Nobody can name an image by tokens, so a block that may continue the prefix goes."""
    path = Path(parts)
    block, length = path.packed[:BLOCK_BYTES], min(length, len(path.tokens))
    forgetting = Forgetting(None, pack_tokens([7] * length))
    named = forgetting.names_block("", Stored(b"", 0, block), {})
    shown = path.truth[: min(length, BLOCK_TOKENS)]
    assert named or {0, 9} & {*shown}
    ids = path.marks.ids(path.tokens)[: len(shown)]
    assert not named or not {0, 9} & {*ids}
