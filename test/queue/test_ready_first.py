"""Admission order: nobody is passed over in more than the stated number of passes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.queue.ready_first import ON_THE_WAY, AdmissionOrder
from sglang_hc.queue.requests import WaitingTable


def test_a_request_on_the_way_does_not_block_those_behind():
    requests: WaitingTable[str] = WaitingTable()
    order: AdmissionOrder[str] = AdmissionOrder(requests, max_passes=2)
    ready = {"a": ON_THE_WAY, "b": 5.0, "c": 0.0}
    assert list(order.order(["a", "b", "c"], ready.get)) == ["b", "c"], "queue order by default"
    order.admitted(["a", "b", "c"], ["b"])
    assert requests["a"].bypassed == 1 and requests["c"].bypassed == 0
    order.admitted(["a", "c"], ["c"])
    assert list(order.order(["a", "d"], lambda r: ready.get(r, 0.0))) == ["a", "d"], "a is due"
    order.admitted(["a", "d"], ["a", "d"])
    assert not order.is_due("a")


def test_ready_first_weighs_tiers_by_their_restore_cost():
    order: AdmissionOrder[str] = AdmissionOrder(WaitingTable(), max_passes=8, ready_first=True)
    cost = {"disk": 0.9, "host": 0.1, "new": 0.0, "device": 0.0, "coming": ON_THE_WAY}
    assert list(order.order(["disk", "coming", "host", "new", "device"], cost.get)) == [
        "new",
        "device",
        "host",
        "disk",
    ]


def test_a_pass_without_admissions_counts_for_nobody():
    order: AdmissionOrder[str] = AdmissionOrder(WaitingTable(), max_passes=1)
    for _ in range(5):
        order.admitted(["a", "b"], [])
    assert not order.is_due("a")
    order.admitted(["a", "b"], ["b"])
    assert order.is_due("a")
    order.forget("a")
    assert not order.is_due("a")


passes = st.lists(
    st.tuples(
        st.integers(0, 3),  # arrivals
        st.lists(st.sampled_from([ON_THE_WAY, 0.0, 0.3, 2.0]), min_size=60, max_size=60),
        st.integers(0, 4),  # how many fit
        st.integers(0, 99),  # an abort, sometimes
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(passes, st.integers(0, 4), st.booleans())
def test_nobody_starves(history, bound, ready_first):
    requests: WaitingTable[int] = WaitingTable()
    order: AdmissionOrder[int] = AdmissionOrder(requests, bound, ready_first=ready_first)
    queue: list[int] = []
    passed: dict[int, int] = {}
    newest = 0
    for arrivals, readiness, fits, abort in history:
        queue += range(newest, newest + arrivals)
        newest += arrivals
        if abort < len(queue):
            order.forget(queue.pop(abort))
        offered = list(order.order(queue, lambda r: readiness[r % 60]))  # noqa: B023
        assert len(set(offered)) == len(offered) and set(offered) <= set(queue)
        chosen = offered[:fits]
        order.admitted(queue, chosen)
        for place, request in enumerate(queue):
            if request not in chosen and any(later in chosen for later in queue[place + 1 :]):
                passed[request] = passed.get(request, 0) + 1
                assert passed[request] <= bound
                assert requests[request].bypassed == passed[request]
        queue = [request for request in queue if request not in chosen]
