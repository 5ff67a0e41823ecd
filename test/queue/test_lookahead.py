"""Look-ahead windows: lengths as in AttentionStore 3.3, uses exactly those of the waiting queue."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.queue.lookahead import LookAhead, RunningMean, window_length
from support.examples import examples


def test_lengths_follow_the_paper():
    # Figure 9: a host with 2 slots and disks with 4 look 2 and 6 jobs ahead.
    assert window_length(2 * 1.5e9, 1.5e9) == 2
    assert window_length((2 + 4) * 1.5e9, 1.5e9) == 6
    assert window_length(0, 1.5e9) == 0
    assert window_length(1, 1.5e9) == 1, "with any capacity the head is looked at"
    assert window_length(1e9, 0.0) == 1, "before the first request has been seen"


def test_mean_forgets_the_distant_past():
    mean = RunningMean(memory=4)
    for value in (2.0, 4.0):
        mean.add(value)
    assert mean.value == 3.0
    for _ in range(60):
        mean.add(100.0)
    assert abs(mean.value - 100.0) < 1e-3


REQUESTS = [f"r{i}" for i in range(12)]
BLOCKS = [bytes([i]) for i in range(9)]
needs = st.fixed_dictionaries(
    {r: st.lists(st.sampled_from(BLOCKS), unique=True, max_size=4) for r in REQUESTS}
)
queues = st.lists(
    st.tuples(st.lists(st.sampled_from(REQUESTS), unique=True), st.integers(0, 12)), max_size=12
)


def expected_use(window: LookAhead, needs_of: dict[str, list[bytes]]) -> dict[bytes, str]:
    first: dict[bytes, str] = {}
    for request in window.order:
        for block in needs_of[request]:
            first.setdefault(block, request)
    return first


@settings(max_examples=examples(300))
@given(needs, queues)
def test_a_block_counts_with_its_earliest_waiting_use(needs_of, passes):
    window = LookAhead()
    told: dict[bytes, float | None] = {}
    window.subscribe(lambda blocks: told.update({b: window.next_use(b) for b in blocks}))
    before: list[str] = []
    inside: list[str] = []
    for queue, length in passes:
        change = window.update(queue, length, needs_of.__getitem__)
        window.check_integrity()
        assert list(change.departed) == [r for r in before if r not in queue]
        assert list(window.order) == queue[:length]
        assert list(change.entered) == [r for r in window.order if r not in inside]
        assert set(change.left) == set(inside) - set(window.order)
        before, inside = queue, list(window.order)
        first = expected_use(window, needs_of)
        for block in BLOCKS:
            request = first.get(block)
            assert window.next_use(block) == (None if request is None else window.rank(request))
            assert told.get(block) == window.next_use(block), "a change went unannounced"


@given(needs, st.lists(st.sampled_from(REQUESTS), unique=True, min_size=1), st.data())
def test_an_abort_is_seen_at_once(needs_of, queue, data):
    window = LookAhead()
    window.update(queue, len(queue), needs_of.__getitem__)
    gone = data.draw(st.sampled_from(queue))
    window.leave(gone)
    window.leave(gone)
    assert gone not in window
    window.check_integrity()
    first = expected_use(window, needs_of)
    assert all((window.next_use(b) is not None) == (b in first) for b in BLOCKS)


def test_needs_are_computed_once_per_request():
    window = LookAhead()
    asked: list[int] = []

    def blocks_of(request: int) -> list[bytes]:
        asked.append(request)
        return [request.to_bytes(2, "big")]

    for start in range(50):
        window.update(list(range(start, start + 100)), 100, blocks_of)
    window.leave(0)
    window.update([0, *range(60, 140)], 100, blocks_of)  # a priority request jumps to the head
    window.update([0, *range(60, 140)], 50, blocks_of)
    window.update([0, *range(60, 140)], 100, blocks_of)
    assert asked == [*range(149), 0]
    assert window.rank(0) < window.rank(60)


def test_ranks_are_given_anew_when_the_gap_between_two_is_a_millionth():
    window = LookAhead()
    queue = ["head", "tail"]
    window.update(queue, 100, lambda request: ())
    for count in range(1, 20):
        queue.insert(1, f"new {count}")
        window.update(queue, 100, lambda request: ())
        assert window.rank(queue[1]) == 1 + 0.5**count
    queue.insert(1, "new 20")
    window.update(queue, 100, lambda request: ())
    assert [window.rank(request) for request in queue] == list(range(1, len(queue) + 1))
