"""Time to live and pins: they end by themselves and no namespace can take more than its bound."""

import contextlib
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.policy.pins import (
    FEW_ENDS,
    PinLimitError,
    RetentionPriority,
    SessionPins,
    TimeToLive,
)
from sglang_hc.queue.lookahead import LookAhead
from support.examples import examples


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


def test_a_namespace_may_have_half_of_what_the_others_leave():
    pins = SessionPins(max_total=16, max_seconds=60)
    for number, most in enumerate((8, 4, 2, 1, 0)):  # made-up namespaces take less and less
        owner = f"n{number}"
        assert pins.max_blocks(owner) == most
        blocks = [b"%d-%d" % (number, block) for block in range(most + 1)]
        with pytest.raises(PinLimitError, match=f"the bound is {most} now"):
            pins.pin(owner, "s", blocks, 10, now=0)
        if most:
            pins.pin(owner, "s", blocks[:most], 10 + number, now=0)
    assert pins.total_blocks == 15
    first = [b"0-%d" % block for block in range(8)]
    pins.pin("n0", "s", first, 20, now=1)  # more than its bound by now, but not more than before
    with pytest.raises(PinLimitError, match="needs 9 blocks in its namespace, the bound is 4 now"):
        pins.pin("n0", "s", [*first, b"more"], 20, now=1)
    pins.check_integrity()
    pins.expire(12)
    assert pins.total_blocks == 8 + 1 and pins.max_blocks("n4") == 3


def steps_of(call) -> int:
    """Instructions of the interpreter that a call takes."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def steps_with(sessions: int) -> tuple[int, int, int]:
    """Of 20 more pins of one block, of as many looks whether one has ended, and of one end. So many
    sessions of ten namespaces try to have a pin before."""
    pins = SessionPins.sized_for(100)
    for number in range(sessions):
        with contextlib.suppress(PinLimitError):
            pins.pin(f"t{number % 10}", f"s{number}", [b"%d" % (number % 10)], 100, now=0)

    def more() -> None:
        for number in range(20):
            pins.pin("victim", f"more{number}", [b"block"], 200, now=1)

    def look() -> None:
        for _ in range(20):
            pins.expire(50)

    pins.pin("victim", "short", [b"block"], 20, now=1)
    return steps_of(more), steps_of(look), steps_of(lambda: pins.expire(30))


def test_30_000_sessions_that_pin_one_block_cost_the_next_one_nothing():
    few, many = steps_with(300), steps_with(30_000)
    assert all(b <= 1.5 * a for a, b in zip(few, many, strict=True)), (few, many)


def test_a_session_pinned_over_and_over_leaves_nothing_behind():
    pins = SessionPins(max_total=8, max_seconds=3600, max_sessions=16)
    for number in range(10_000):
        pins.pin("t", f"s{number % 3}", [b"block"], 3600 - number % 7, now=0)
    pins.check_integrity()
    assert len(pins._ends) <= 2 * 3 + FEW_ENDS
    assert len(pins.expire(3600)) == 3 and not len(pins)


def test_retention_priority_puts_pins_behind_the_queue():
    window = LookAhead()
    pins = SessionPins(max_total=6, max_seconds=60)
    priority = RetentionPriority(window, pins)
    heard: list[bytes] = []
    priority.subscribe(heard.extend)
    pins.pin("t", "s", ids("ab"), 10, now=0)
    window.update(["r"], 9, lambda _: ids("bc"))
    assert priority.next_use(b"a") == float("inf")
    assert priority.next_use(b"b") == priority.next_use(b"c") == window.rank("r")
    assert priority.next_use(b"d") is None and len(priority) == 2
    pins.expire(10)
    assert priority.next_use(b"a") is None
    assert priority.next_use(b"b") == window.rank("r")
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


@settings(max_examples=examples(200))
@given(operations)
def test_counts_follow_from_the_pins_that_are_alive(history):
    pins = SessionPins(max_total=10, max_seconds=20, max_sessions=5)
    model: dict[tuple[str, str], tuple[float, set[bytes]]] = {}
    now = 0.0
    for namespace, session, numbers, seconds, action in history:
        blocks = {namespace.encode() + bytes([n]) for n in numbers}
        if action == "pin":
            rest = {k: v for k, v in model.items() if k != (namespace, session) and v[0] > now}
            own = {k: b for k, (_, b) in model.items() if k[0] == namespace}
            held = set().union(*own.values())
            left = set().union(*(b for k, (_, b) in rest.items() if k[0] == namespace)) | blocks
            foreign = set().union(*(b for k, (_, b) in rest.items() if k[0] != namespace))
            sessions = sum(k[0] != namespace for k in rest)
            full = (namespace, session) not in own and len(own) >= (5 - sessions) // 2
            if full or len(left) > max(len(held), (10 - len(foreign)) // 2):
                why = "sessions with pins" if full else "blocks in its namespace"
                with pytest.raises(PinLimitError, match=f"{why}.*unpin another session"):
                    pins.pin(namespace, session, blocks, seconds, now)
            else:
                pins.pin(namespace, session, blocks, seconds, now)
                model[namespace, session] = (now + seconds, blocks)
        elif action == "unpin":
            found = model.pop((namespace, session), None)
            assert pins.unpin(namespace, session) == (found is not None)
        else:
            now += seconds
            ended = {key for key, (expires, _) in model.items() if expires <= now}
            assert set(pins.expire(now)) == ended
        model = {k: v for k, v in model.items() if v[0] > now}
        pins.check_integrity()
        held = set().union(*(b for _, b in model.values())) if model else set()
        everything = {n.encode() + bytes([i]) for n in "tu" for i in range(7)}
        if action != "unpin":  # unpin does not look at the clock
            assert {b for b in everything if pins.is_pinned(b)} == held


def test_a_namespace_pins_a_quarter_of_the_tier_and_all_of_them_half():
    pins = SessionPins.sized_for(40)
    names = [f"a{number}".encode() for number in range(11)]
    pins.pin("a", "s", names[:10], 10, now=0)
    with pytest.raises(PinLimitError, match="the bound is 10"):
        pins.pin("a", "s", names, 10, now=0)
    assert pins.max_blocks("b") == 5
    pins.pin("c", "s", [], 3600, now=0)
    with pytest.raises(PinLimitError, match="at most 3600 s"):
        pins.pin("c", "s", [], 3601, now=0)


def test_all_pins_of_some_namespaces_end_at_once():
    pins = SessionPins(max_total=40, max_seconds=60)
    for owner in ("a", "a2", "b", None):
        for session in "xy":
            pins.pin(owner, session, [f"{owner}{session}".encode()], 10, now=0)
    assert pins.unpin_all(lambda owner: owner in ("a", None)) == 4
    assert len(pins) == 4 and pins.held("a") == 0 and pins.held("a2") == 2
    pins.check_integrity()
