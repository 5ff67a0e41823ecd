"""What is audited, what counts as a difference, and when a form is stopped."""

from __future__ import annotations

import pytest

from sglang_hc.forms import Form
from sglang_hc.policy.audit import STOP_AFTER, WIDEST, Findings, Sampler, bound


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
def test_the_share_is_picked_the_same_in_every_process(share: float) -> None:
    one, other = Sampler(share), Sampler(share)
    picked = [one.picks(100) for _ in range(200)]
    assert picked == [other.picks(100) for _ in range(200)]
    assert sum(map(len, picked)) == pytest.approx(share * 20_000, rel=0.15)
    assert all(numbers == sorted(set(numbers)) for numbers in picked)


def test_all_or_nothing() -> None:
    assert Sampler(1.0).picks(5) == [0, 1, 2, 3, 4]
    assert Sampler(0.0).picks(5) == []


def test_no_place_of_a_path_is_left_out_for_ever() -> None:
    sampler = Sampler(0.1)
    assert {n for _ in range(200) for n in sampler.picks(8)} == set(range(8))


def test_each_layer_adds_its_roundings_up_to_what_other_tokens_differ_by() -> None:
    assert bound(1e-5, 0) == 1e-5
    assert bound(1e-5, 31) == pytest.approx(32e-5)
    assert bound(0.02, 23) == pytest.approx(0.48)
    assert bound(0.02, 79) == WIDEST
    assert bound(1e-5, 1, behind_choice=True) == WIDEST


@pytest.mark.parametrize("form", [Form.HIDDEN, Form.KV])
def test_a_form_stops_at_its_own_number(form: Form) -> None:
    other = Form.KV if form is Form.HIDDEN else Form.HIDDEN
    findings = Findings()
    assert findings.note([other]) is None
    assert [findings.note([form]) for _ in range(STOP_AFTER - 1)] == [None] * (STOP_AFTER - 1)
    assert findings.note([form]) is form
    assert findings.note([form]) is None, "it is said once"
