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


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 12))))
def test_whoever_has_no_more_than_others_keeps_its_names(notes: list[tuple[str, int, int]]) -> None:
    """Of a quarter of the tokens and sessions each of three clients is sure, whatever others do."""
    sessions, used = Sessions(40, max_sessions=8), dict[str, list[tuple[int, int]]]()
    for now, (client, name, tokens) in enumerate(notes):
        sessions.note(str(name), path(tokens, f"s1:{client}"), now)
        sessions.check_integrity()
        mine = [one for one in used.setdefault(client, []) if one[0] != name]
        used[client] = [*mine, (name, tokens)]
        for other, left in used.items():
            newest = left[-2:]
            if sum(count for _, count in newest) <= 10:
                assert all(sessions.of(f"s1:{other}", str(one)) for one, _ in newest)
