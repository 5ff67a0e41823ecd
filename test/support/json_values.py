"""Any value that JSON can hold."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def json_values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """texts: of which strings and names are."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | texts,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )
