"""Admission order: nobody is passed over in more than the stated number of passes."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_hc.queue.admission import ON_THE_WAY, Admission
from sglang_hc.queue.requests import RequestTable
from support.examples import examples


def offered(
    admission: Admission, queue: list, readiness: Callable, *, ready_first: bool = False
) -> list:
    """Whom the scheduler may admit, in the order in which it asks."""
    order = admission.order(queue, readiness) if ready_first else queue
    return [
        name for name in order if admission.must_admit(name) or readiness(name) is not ON_THE_WAY
    ]


def test_a_request_on_the_way_does_not_block_those_behind():
    requests = RequestTable()
    admission = Admission(requests, bound=2)
    ready = {"a": ON_THE_WAY, "b": 5.0, "c": 0.0, "d": 0.0}
    assert offered(admission, ["a", "b", "c"], ready.get) == ["b", "c"], "queue order by default"
    admission.count(["a", "b", "c"], ["b"])
    assert requests["a"].bypassed == 1 and requests["c"].bypassed == 0
    admission.count(["a", "c"], ["c"])
    assert offered(admission, ["a", "d"], ready.get) == ["a", "d"], "a is due"
    requests.left("a")
    assert not admission.must_admit("a")


def test_ready_first_weighs_tiers_by_their_restore_cost():
    admission = Admission(RequestTable(), bound=8)
    cost = {"disk": 0.9, "host": 0.1, "new": 0.0, "device": 0.0, "coming": ON_THE_WAY}
    queue = ["disk", "coming", "host", "new", "device"]
    assert admission.order(queue, cost.get) == ["new", "device", "host", "disk", "coming"]


def test_who_is_due_goes_before_all_that_are_ready():
    requests = RequestTable()
    admission = Admission(requests, bound=1)
    requests["slow"].bypassed = 1
    cost = {"ready": 0.0, "coming": ON_THE_WAY, "slow": ON_THE_WAY}
    assert admission.order(list(cost), cost.get) == ["slow", "ready", "coming"]


def test_a_pass_without_admissions_counts_for_nobody():
    admission = Admission(RequestTable(), bound=1)
    for _ in range(5):
        admission.count(["a", "b"], [])
    assert not admission.must_admit("a")
    admission.count(["a", "b"], ["b"])
    assert admission.must_admit("a")


def test_only_who_was_asked_for_counts_as_admitted():
    requests = RequestTable()
    admission = Admission(requests)
    for name in "abc":
        admission.asked(name)
    admission.left("c")
    assert admission.admitted(["b", "c", "d"]) == ["b"]
    assert requests["a"].bypassed == 1
    assert admission.admitted(["a"]) == [], "nobody was asked for in this pass"


passes = st.lists(
    st.tuples(
        st.integers(0, 3),  # arrivals
        st.lists(st.sampled_from([ON_THE_WAY, 0.0, 0.3, 2.0]), min_size=60, max_size=60),
        st.integers(0, 4),  # how many fit
        st.integers(0, 99),  # an abort, sometimes
    ),
    max_size=60,
)


@settings(max_examples=examples(200), deadline=None)
@given(passes, st.integers(0, 4), st.booleans())
def test_nobody_starves(history, bound, ready_first):
    requests = RequestTable()
    admission = Admission(requests, bound=bound)
    queue: list[int] = []
    passed: dict[int, int] = {}
    newest = 0
    for arrivals, readiness, fits, abort in history:
        queue += range(newest, newest + arrivals)
        newest += arrivals
        if abort < len(queue):
            requests.left(queue.pop(abort))
        may = offered(
            admission,
            queue,
            lambda r: readiness[r % 60],  # noqa: B023
            ready_first=ready_first,
        )
        assert len(set(may)) == len(may) and set(may) <= set(queue)
        chosen = may[:fits]
        admission.count(queue, chosen)
        for place, request in enumerate(queue):
            if request not in chosen and any(later in chosen for later in queue[place + 1 :]):
                passed[request] = passed.get(request, 0) + 1
                assert passed[request] <= bound
                assert requests[request].bypassed == passed[request]
        for request in chosen:
            requests.left(request)
        queue = [request for request in queue if request not in chosen]


def test_a_request_is_due_after_64_bypasses():
    admission = Admission(RequestTable())
    for _ in range(63):
        admission.count(["a", "b"], ["b"])
    assert not admission.must_admit("a")
    admission.count(["a", "b"], ["b"])
    assert admission.must_admit("a")
