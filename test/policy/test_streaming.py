"""What `--hc-throughput` takes, and what is said of the rest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_hc.errors import ConfigError
from sglang_hc.policy.streaming import Streaming, ThroughputSpec

SIZES = st.floats(1e-9, 1e6)
SPECS = st.builds(
    ThroughputSpec,
    act=st.none() | st.floats(0, 1),
    rounds=st.none() | st.integers(1, 10**6),
    device_act_gb=st.none() | st.just(0.0) | SIZES,
    host_gb=st.none() | SIZES,
    device_gb=st.none() | SIZES,
)


@given(SPECS)
def test_a_specification_survives_its_text(spec: ThroughputSpec) -> None:
    assert ThroughputSpec.parse(str(spec)) == spec


@given(st.permutations(["act:0.5", "rounds:3", "device-act-gb:0", "host-gb:64", "device-gb:2.5"]))
def test_its_parts_may_stand_in_any_order(parts: list[str]) -> None:
    assert ThroughputSpec.parse(",".join(parts)) == ThroughputSpec(0.5, 3, 0.0, 64.0, 2.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a part of act:SHARE,"),
        ("act", "'act' is not a part of"),
        ("act:0.5,", "'' is not a part of .*; give some of these, or auto"),
        ("act:0.5,auto", "'auto' is not a part of"),
        ("batch:3", "'batch:3' is not a part of"),
        ("act:half", "act:half: give a share from 0 .* to 1"),
        ("act:1.5", "act:1.5: give a share"),
        ("act:nan", "act:nan: give a share"),
        ("act:0,act:1", "act is given more than once"),
        ("rounds:0", "rounds:0: give 1 or more"),
        ("rounds:1.5", "rounds:1.5: give 1 or more"),
        ("rounds:inf", "rounds:inf: give 1 or more"),
        ("device-act-gb:-1", "device-act-gb:-1: give 0 or more GiB"),
        ("host-gb:0", "host-gb:0: give more than 0 GiB"),
        ("device-gb:inf", "device-gb:inf: give more than 0 GiB"),
    ],
)
def test_a_bad_value_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ThroughputSpec.parse(text)


@given(st.integers(-1, 9), st.integers(-1, 9), st.integers(-1, 9), st.integers(-1, 9))
def test_slots_are_divided_or_refused(tokens: int, act: int, device: int, rows: int) -> None:
    if 0 <= device <= act <= tokens and rows > 0:
        assert 0 <= Streaming(tokens, act, device, rows).act <= 1
    else:
        with pytest.raises(ValueError, match="no such division"):
            Streaming(tokens, act, device, rows)
