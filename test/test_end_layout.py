"""Where an end part's bytes lie, how host memory is divided, and what identities depend on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.forms import (
    BLOCK_TOKENS,
    CHUNK_ALIGN,
    STATE_ALIGN,
    BlockLayout,
    EndLayout,
    Form,
    LayerPlan,
    PlanError,
    StateLayers,
    StateShape,
    WindowLayers,
)
from sglang_hc.store.host_memory import (
    MOST_FOR_ENDS,
    TOKENS_PER_END,
    HostMemory,
    MemorySpec,
    divided,
    least_bytes,
)
from sglang_hc.store.host_pool import EndPool

WINDOW = EndLayout(window=WindowLayers((1, 2, 5), 100, (6, 10)))
STATE = EndLayout(state=StateLayers((0, 3), (100, 4097, 8), ("bfloat16", "float32", "float32")))
BOTH = EndLayout(WindowLayers((1, 4), BLOCK_TOKENS, (64, 32)), STATE.state)
LAYOUTS = pytest.mark.parametrize("layout", [WINDOW, STATE, BOTH])


def blocks(ends: EndLayout | None, layers: int = 2) -> BlockLayout:
    shape = StateShape(layers, 32, (16, 16), "uint8")
    return BlockLayout(LayerPlan(0, 0, layers), shape, ends=ends)


def test_layers_have_their_form() -> None:
    assert [BOTH.form(layer) for layer in range(6)] == [
        Form.STATE, Form.WINDOW, None, Form.STATE, Form.WINDOW, None,
    ]  # fmt: skip
    assert BOTH.full_layers(6) == (2, 5) and BOTH.has_state and not WINDOW.has_state


@pytest.mark.parametrize(
    ("tokens", "count"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3), (1024, 16)]
)
def test_an_end_needs_the_blocks_that_its_window_reaches_into(tokens: int, count: int) -> None:
    assert EndLayout(WindowLayers((0,), tokens, (8, 8))).blocks == count
    assert STATE.blocks == 1


@LAYOUTS
def test_chunks_follow_each_other_and_fill_the_part(layout: EndLayout) -> None:
    at = 0
    for _, offset, length in layout.chunks():
        assert offset == at and length % CHUNK_ALIGN == 0 and length > 0
        at += length
    assert at == layout.slot_bytes
    assert [layer for layer, *_ in layout.chunks()] == [*layout.window.layers, *layout.state.layers]


@LAYOUTS
def test_every_byte_of_every_view_has_a_place_of_its_own(layout: EndLayout) -> None:
    pool = EndPool(layout, 3)
    chunks = {layer: offset for layer, offset, _ in layout.chunks()}
    for view in (*pool.window, *pool.state):
        view[1] += 1
    total = len(layout.window.layers) * BLOCK_TOKENS * sum(layout.window.parts)
    total += len(layout.state.layers) * sum(layout.state.parts)
    assert pool.bytes.max() == 1 and np.count_nonzero(pool.bytes) == total
    assert not pool.bytes[0].any() and not pool.bytes[2].any()
    base = 0
    for view, part in zip(pool.window, layout.window.parts, strict=True):
        for index, layer in enumerate(layout.window.layers):
            view[2, index, 63, part - 1] = 9
            assert pool.slot(2)[chunks[layer] + base + 63 * part + part - 1] == 9
        base += BLOCK_TOKENS * part
    for view, part, start in zip(
        pool.state, layout.state.parts, layout.state_offsets[:-1], strict=True
    ):
        assert start % STATE_ALIGN == 0
        for index, layer in enumerate(layout.state.layers):
            view[2, index, 0, part - 1] = 7
            assert pool.view(2)[chunks[layer] + start + part - 1] == 7


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"window": WindowLayers((1,), 0, (8, 8))},
        {"window": WindowLayers((1, 1), 64, (8, 8))},
        {"window": WindowLayers((1,), 64, (8, 8)), "state": StateLayers((1,), (8,), ("int8",))},
        {"window": WindowLayers((1,), 65, (8, 8)), "state": STATE.state},
    ],
)
def test_a_layout_that_nobody_can_keep_is_refused(parts: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        EndLayout(**parts)  # type: ignore[arg-type]


def test_identities_depend_on_what_ends_are() -> None:
    plain = blocks(None)
    assert plain.fingerprint("m").hex() == "c4161c66e609fc208d12cd4b1eb9656a", "as before ends"
    longer = replace(WINDOW, window=replace(WINDOW.window, tokens=101))
    other = replace(STATE, state=replace(STATE.state, dtypes=("bfloat16", "bfloat16", "float32")))
    layouts = (None, WINDOW, longer, STATE, other)
    assert len({blocks(ends).fingerprint("m") for ends in layouts}) == 5
    of_blocks = blocks(WINDOW).fingerprint("m")
    names = {of_blocks, WINDOW.fingerprint(of_blocks), WINDOW.fingerprint(plain.fingerprint("m"))}
    assert len(names) == 3


@given(
    size=st.integers(1 << 16, 1 << 32),
    tokens=st.sampled_from([64, 128, 1024]),
    row=st.integers(1, 40000),
)
def test_host_memory_is_divided_by_bytes(size: int, tokens: int, row: int) -> None:
    layout = blocks(EndLayout(WindowLayers((1,), tokens, (row,))))
    assert layout.ends is not None
    slots, end_slots = divided(size, layout)
    assert (slots > 0) == (size >= least_bytes(layout))
    end = layout.ends.blocks * layout.ends.slot_bytes
    if slots:
        used = MemorySpec(layout, slots, BLOCK_TOKENS, 0, end_slots).bytes
        assert used <= size < used + layout.slot_bytes + layout.ends.slot_bytes
        assert end_slots * layout.ends.slot_bytes <= max(size * MOST_FOR_ENDS, end)
        ends = end_slots / layout.ends.blocks
        assert ends <= slots * BLOCK_TOKENS / TOKENS_PER_END + 1
    assert end_slots >= layout.ends.blocks


def test_a_plain_model_has_no_end_parts() -> None:
    layout = blocks(None)
    assert divided(10 * layout.slot_bytes + 1, layout) == (10, 0)
    assert least_bytes(layout) == layout.slot_bytes
    memory = HostMemory(MemorySpec(layout, 10, BLOCK_TOKENS, 0))
    assert memory.ends is None and memory.spec.bytes == 10 * layout.slot_bytes


def test_blocks_and_end_parts_do_not_overlap() -> None:
    memory = HostMemory(MemorySpec(blocks(STATE), 3, BLOCK_TOKENS, 0, 2))
    assert memory.ends is not None
    memory.pool.bytes[:] = 7
    assert not memory.ends.bytes.any()
    memory.ends.bytes[:] = 9
    assert (memory.pool.bytes == 7).all()
