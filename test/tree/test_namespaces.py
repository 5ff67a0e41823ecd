"""Two lists of parts never have one name, whatever clients write into them."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_hc.tree.namespaces import MAX_KEY_BYTES, Namespace, client_namespace

texts = st.text(st.characters(codec="utf-8"), max_size=5)
sly = st.sampled_from(["", "s0:", "k1:a", "s1:ak1:b", "a2:ff", "c", "1:", "k01:a", "s4:acmek1:2"])
values = st.none() | texts | sly
parts = st.builds(Namespace, *[values] * 6)


@given(parts, parts)
@example(Namespace(salt="acme", key="2"), Namespace(salt="acme2"))
@example(Namespace(salt="acme", key="2"), Namespace(key="s4:acmek1:2"))
@example(Namespace(key="ab"), Namespace(key="a", adapter="b"))
@example(Namespace(key="a", weights="b"), Namespace(key="a", adapter="b"))
def test_other_parts_have_another_name(one: Namespace, other: Namespace) -> None:
    assert (one.pack() == other.pack()) == (one == other)


@given(parts)
def test_a_name_is_read_back(one: Namespace) -> None:
    assert Namespace.of(one.pack()) == one


@given(st.text(max_size=12) | sly)
@example("k" + "9" * 5000 + ":x")
def test_any_text_is_a_namespace(text: str) -> None:
    """What nobody packed is a client's key; so is what is packed in another way."""
    found = Namespace.of(text)
    assert Namespace.of(found.pack()) == found
    assert found.pack() == text or found == Namespace.of_key(text)


@given(values, values)
def test_a_client_names_no_cut_no_adapter_and_no_weights(salt: str | None, key: str | None) -> None:
    found = Namespace.of(client_namespace(salt, key))
    assert found == Namespace(salt=salt, key=key) == found.client


@pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
def test_a_key_is_bounded(name: str) -> None:
    def sent(value: object) -> str | None:
        return client_namespace(*((value, None) if name == "cache_salt" else (None, value)))

    assert sent("\u00fc" * (MAX_KEY_BYTES // 2)) is not None
    with pytest.raises(ValueError, match=f"{name} has {MAX_KEY_BYTES + 2} bytes; at most"):
        sent("\u00fc" * (MAX_KEY_BYTES // 2 + 1))
    with pytest.raises(ValueError, match=f"{name} has a lone surrogate"):
        sent("a\ud800")
    for wrong in ([], ["a"], 7, True, {"a": 1}, b"a"):
        with pytest.raises(ValueError, match=f"{name} must be a string, not "):
            sent(wrong)


def test_a_key_that_cannot_be_kept_is_known_by_its_digest() -> None:
    kept = "x" * MAX_KEY_BYTES
    assert Namespace.of_key(kept) == Namespace(key=kept)
    found = [Namespace.of_key(key) for key in ("a\ud800", "a\ud801", kept + "x", kept + "y")]
    assert len(set(found)) == 4
    assert all(one.key is None and len(one.hashed or "") == 32 for one in found)
