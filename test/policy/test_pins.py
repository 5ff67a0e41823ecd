"""Time to live and pins: they end by themselves and no namespace can take more than its bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.pins import PinLimitError, RetentionPriority, SessionPins, TimeToLive
from sglang_hc.queue.windows import LookAhead


def ids(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def test_a_block_lives_for_its_time_after_the_last_use():
    ttl: TimeToLive[bytes] = TimeToLive(10.0)
    for name, now in ((b"a", 0.0), (b"b", 1.0), (b"a", 8.0)):
        ttl.touch(name, now)
    assert ttl.expired(10.9) == []
    assert ttl.expired(11.0) == [b"b"]
    ttl.forget(b"b")
    ttl.forget(b"b")
    assert ttl.expired(18.0) == [b"a"]
    with pytest.raises(ValueError, match="positive"):
        TimeToLive(0)


def test_a_pin_ends_by_itself_and_can_be_renewed():
    pins = SessionPins(max_blocks=8, max_total=16, max_seconds=60)
    pins.pin("t", "s", ids("ab"), 10, now=0)
    pins.pin("t", "s", ids("abc"), 10, now=5)
    assert pins.expire(10) == [] and pins.is_pinned(b"c")
    assert pins.expire(15) == [("t", "s")]
    assert not any(map(pins.is_pinned, ids("abc")))


def test_a_pin_beyond_the_bound_is_refused_and_changes_nothing():
    pins = SessionPins(max_blocks=3, max_total=9, max_seconds=60)
    pins.pin("t", "one", ids("sab"), 10, now=0)
    pins.pin("u", "one", ids("xyz"), 10, now=0)  # another namespace has its own bound
    with pytest.raises(PinLimitError, match="unpin another session"):
        pins.pin("t", "two", ids("sc"), 10, now=1)
    assert len(pins.pinned_blocks("t")) == 3 and not pins.is_pinned(b"c")
    pins.pin("t", "two", ids("sa"), 10, now=1)  # shared blocks count once
    pins.pin("t", "one", ids("sac"), 10, now=1)  # replaced, not added
    assert pins.is_pinned(b"c") and not pins.is_pinned(b"b")
    with pytest.raises(PinLimitError, match="at most 60 s"):
        pins.pin("t", "three", [], 61, now=1)
    assert pins.unpin("t", "two") and not pins.unpin("t", "two")


def test_all_namespaces_together_are_bounded_too():
    pins = SessionPins(max_blocks=3, max_total=4, max_seconds=60)
    pins.pin("t", "one", ids("abc"), 10, now=0)
    with pytest.raises(PinLimitError, match="3 of the 4 that may be pinned are"):
        pins.pin("u", "one", ids("xy"), 10, now=1)
    pins.pin("u", "one", ids("x"), 10, now=1)
    pins.pin("u", "one", ids("xy"), 10, now=11)  # the first has expired
    assert pins.total_blocks == 2 and len(pins) == 1
    assert [pin.session for pin in pins.of("u", now=11)] == ["one"]


def test_retention_priority_puts_pins_behind_the_queue():
    window: LookAhead[str] = LookAhead()
    pins = SessionPins(max_blocks=3, max_total=3, max_seconds=60)
    priority = RetentionPriority(window, pins)
    heard: list[bytes] = []
    priority.subscribe(heard.extend)
    pins.pin("t", "s", ids("ab"), 10, now=0)
    window.update(["r"], 9, lambda _: ids("bc"))
    assert priority.next_use(b"a") == float("inf")
    assert priority.next_use(b"b") == priority.next_use(b"c") == window.rank("r")
    assert priority.next_use(b"d") is None and len(priority) == 2
    assert priority.next_uses(ids("abd")) == {b: priority.next_use(b) for b in ids("abd")}
    pins.expire(10)
    assert priority.next_use(b"a") is None
    assert priority.next_uses(ids("abd")) == {b"a": None, b"b": window.rank("r"), b"d": None}
    assert sorted(heard) == sorted(ids("ab") + ids("bc") + ids("ab"))


operations = st.lists(
    st.tuples(
        st.sampled_from("tu"),
        st.sampled_from(["s1", "s2", "s3"]),
        st.sets(st.integers(0, 6), max_size=5),
        st.floats(0.5, 20),
        st.sampled_from(["pin", "unpin", "wait"]),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(operations)
def test_counts_follow_from_the_pins_that_are_alive(history):
    pins = SessionPins(max_blocks=6, max_total=9, max_seconds=20)
    model: dict[tuple[str, str], tuple[float, set[bytes]]] = {}
    now = 0.0
    for namespace, session, numbers, seconds, action in history:
        blocks = {namespace.encode() + bytes([n]) for n in numbers}
        if action == "pin":
            rest = {k: v for k, v in model.items() if k != (namespace, session) and v[0] > now}
            others = set().union(*(b for k, (_, b) in rest.items() if k[0] == namespace))
            everybodys = set().union(*(b for _, b in rest.values()))
            if len(others | blocks) > 6 or len(everybodys | blocks) > 9:
                with pytest.raises(PinLimitError):
                    pins.pin(namespace, session, blocks, seconds, now)
            else:
                pins.pin(namespace, session, blocks, seconds, now)
                model[namespace, session] = (now + seconds, blocks)
        elif action == "unpin":
            pins.unpin(namespace, session)
            model.pop((namespace, session), None)
        else:
            now += seconds
            pins.expire(now)
        model = {k: v for k, v in model.items() if v[0] > now}
        pins.check_integrity()
        held = set().union(*(b for _, b in model.values())) if model else set()
        everything = {n.encode() + bytes([i]) for n in "tu" for i in range(7)}
        if action != "unpin":  # unpin does not look at the clock
            assert {b for b in everything if pins.is_pinned(b)} == held


def test_a_namespace_pins_a_quarter_of_the_tier_and_all_of_them_half():
    pins = SessionPins.sized_for(40)
    for tenant in "ab":
        names = [f"{tenant}{number}".encode() for number in range(11)]
        pins.pin(tenant, "s", names[:10], 10, now=0)
        with pytest.raises(PinLimitError, match="the bound is 10"):
            pins.pin(tenant, "s", names, 10, now=0)
    with pytest.raises(PinLimitError, match="20"):
        pins.pin("c", "s", [b"c"], 10, now=0)
    pins.pin("c", "s", [], 3600, now=0)
    with pytest.raises(PinLimitError, match="at most 3600 s"):
        pins.pin("c", "s", [], 3601, now=0)
