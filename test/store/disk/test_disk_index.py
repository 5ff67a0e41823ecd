"""The index alone: what a batch of rows does to rows that are there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.store.disk import index_file
from sglang_hc.store.disk.index import ROWS_PER_COMMIT, Index
from sglang_hc.store.disk.index_file import NewRow, Place

MODELS = (1, 2)
names = st.tuples(st.sampled_from(MODELS), st.integers(0, 5))
batches = st.lists(
    st.lists(names, min_size=1, max_size=ROWS_PER_COMMIT, unique=True), min_size=1, max_size=6
)


@settings(max_examples=25, deadline=None)
@given(batches)
def test_a_batch_replaces_just_the_rows_of_its_own_blocks(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[tuple[int, int]]]
) -> None:
    """Of two models that share identities; each replaced place is returned once."""
    folder = tmp_path_factory.mktemp("index")
    path = str(folder / "index.sqlite")
    index_file.create(path)
    index = Index(path)
    expected: dict[tuple[int, int], Place] = {}
    slot = 0
    for batch in batches:
        rows, gone = [], []
        for model, name in batch:
            if (model, name) in expected:
                gone.append(expected[model, name])
            expected[model, name] = Place(1, slot)
            rows.append(NewRow(model, bytes([name] * 16), "", 1, slot, slot, slot))
            slot += 1
        assert sorted(index.insert(rows)) == sorted(gone)
    index.close()
    index = Index(path)
    for model in MODELS:
        for name in range(6):
            assert index.place(model, bytes([name] * 16)) == expected.get((model, name))
    assert len(list(index.all_rows())) == len(expected)
    index.close()
