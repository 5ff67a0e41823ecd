"""Sessions by name: whose they are, how many, and how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.tiers.sessions import Sessions
from sglang_hc.tree.identity import Prefix, pack_tokens


def path(tokens: int, namespace: str | None = None) -> Prefix:
    return Prefix(namespace, pack_tokens(range(tokens)))


def test_a_session_is_its_clients_whatever_was_cut_or_adapted():
    sessions = Sessions(1000)
    sessions.note("s", path(5, "s4:acmec3:1/2a2:0f"), 0)
    assert sessions.of("s4:acme", "s") == path(5, "s4:acmec3:1/2a2:0f")
    assert sessions.of(None, "s") is None and sessions.of("s4:acma", "s") is None
    sessions.note("s", path(7, "s4:acme"), 0)
    assert sessions.of("s4:acme", "s") == path(7, "s4:acme") and len(sessions) == 1
    sessions.forget(lambda client: client == "s4:acme")
    assert len(sessions) == 0


def test_both_sides_of_the_most_tokens_and_sessions():
    sessions = Sessions(10, max_sessions=3)
    sessions.note("a", path(5), 0)
    sessions.note("b", path(5), 0)
    assert len(sessions) == 2
    sessions.note("c", path(1), 0)
    assert sessions.of(None, "a") is None and len(sessions) == 2
    sessions.note("d", path(1), 0)
    assert len(sessions) == 3
    sessions.note("e", path(1), 0)
    assert sessions.of(None, "b") is None and len(sessions) == 3
    sessions.note("f", path(11), 0)
    assert len(sessions) == 0, "longer than all that is known"


def test_a_session_lives_for_its_time_after_the_last_use():
    sessions = Sessions(100, ttl=10.0)
    sessions.note("a", path(1), 0)
    sessions.note("b", path(1), 5)
    sessions.expire(10.0)
    assert len(sessions) == 2
    sessions.note("a", path(1), 10.5)
    sessions.expire(16.0)
    assert sessions.of(None, "b") is None and sessions.of(None, "a") is not None
    Sessions(100).expire(1e9)


_modest = st.tuples(st.just("a"), st.integers(0, 1), st.integers(1, 5))
_others = st.tuples(st.sampled_from("bc"), st.integers(0, 9), st.integers(1, 12))


@given(st.lists(st.one_of(_modest, _others)))
def test_who_has_a_share_at_most_keeps_its_names(notes: list[tuple[str, int, int]]) -> None:
    """Of a quarter of the tokens and sessions each of three clients is sure, whatever others do."""
    sessions, used = Sessions(40, max_sessions=8), set[int]()
    for now, (client, name, tokens) in enumerate(notes):
        sessions.note(str(name), path(tokens, f"s1:{client}"), now)
        sessions.check_integrity()
        assert sessions.of(f"s1:{client}", str(name)) is not None
        if client == "a":
            used.add(name)
        assert all(sessions.of("s1:a", str(one)) for one in used)


def test_who_has_one_long_session_is_not_kept_out_by_many_who_have_short_ones():
    sessions = Sessions(1000)
    for number in range(100):
        sessions.note("s", path(10, f"s2:{number:02}"), number)
    for number in range(3):
        client = f"s3:on{number}"
        sessions.note("s", path(200, client), 100)
        sessions.check_integrity()
        assert sessions.of(client, "s") == path(200, client), "the one that was used last"
    assert sessions.of("s3:on0", "s") is not None and sessions.of("s2:00", "s") is None
    sessions.note("s", path(900, "s1:x"), 101)
    assert sessions.of("s1:x", "s") is not None, "more than a share, but only one"


def test_who_gives_many_names_forgets_its_own_first():
    sessions = Sessions(1000, max_sessions=100)
    for number in range(10):
        sessions.note("s", path(1, f"s1:{number}"), 0)
    for number in range(300):
        sessions.note(str(number), path(1, "s4:evil"), 0)
        sessions.check_integrity()
    assert all(sessions.of(f"s1:{number}", "s") for number in range(10))
    assert len(sessions) == 100 and sessions.of("s4:evil", "299") is not None
