"""What a client writes into a request: taken, or refused with ValueError (status 400). What comes
to the scheduler all the same is answered or left out, and raises nothing."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_hc.srt.arguments.server_args import CUT_KEY_ENV
from sglang_hc.srt.requests import entrance
from sglang_hc.srt.requests.overflow import accept_cut, dropped_of, earlier_of, read_field
from sglang_hc.srt.requests.pins import pin_request_of, read_pin_request
from support.hostile import HOSTILE, deep
from support.json_values import json_values

TEXT = st.text(max_size=30) | st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2)
JSON = json_values(TEXT)
NAMES = [*entrance.NAMES, *entrance.OWN_FIELDS, "session_params", "sampling_params"]
CUSTOM = st.dictionaries(st.sampled_from(["hc_pin", "hc_overflow", "hc_cut", "x"]), JSON)


def request(**fields: Any) -> GenerateReqInput:
    made = GenerateReqInput(input_ids=[1, 2])
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3))
def test_fields_are_taken_or_refused(fields: dict[str, Any]) -> None:
    made = request(**fields)
    try:
        entrance.check_fields(made)
    except ValueError as error:
        assert str(error).encode() and len(str(error)) < 500
    else:
        assert all(not isinstance(value, list) for name, value in fields.items())


@given(st.dictionaries(TEXT | st.sampled_from(SamplingParams.__struct_fields__), JSON, max_size=4))
@example({"custom_params": deep(400)})
@example({"logit_bias": {"5": float("inf")}})
def test_sampling_params_are_taken_or_refused(sampling: dict[str, Any]) -> None:
    try:
        entrance.check_fields(request(sampling_params=sampling))
    except ValueError as error:
        assert str(error).encode("utf-8", "replace")


@pytest.mark.parametrize("most", [entrance.MOST_NAME_BYTES])
def test_both_sides_of_the_longest_name(most: int) -> None:
    entrance.check_fields(request(extra_key="ä" * (most // 2)))
    with pytest.raises(ValueError, match=f"extra_key has more than {most} bytes"):
        entrance.check_fields(request(extra_key="ä" * (most // 2) + "a"))
    entrance.check_fields(request(sampling_params={"n": entrance.MOST_SAMPLES}))
    with pytest.raises(ValueError, match="n must be a number from 1 to"):
        entrance.check_fields(request(sampling_params={"n": entrance.MOST_SAMPLES + 1}))
    entrance.check_fields(request(sampling_params={"logit_bias": {"5": entrance.MOST_BIAS}}))
    with pytest.raises(ValueError, match="logit_bias must be of numbers up to"):
        entrance.check_fields(request(sampling_params={"logit_bias": {"5": 1.1e30}}))


def test_a_batch_may_have_a_name_for_each() -> None:
    batch = request(extra_key=["a", None], rid=["x", "y"])
    batch.input_ids = [[1], [2]]
    entrance.check_fields(batch)
    batch.extra_key = []
    with pytest.raises(ValueError, match="extra_key is an empty list"):
        entrance.check_fields(batch)


@pytest.mark.parametrize("read", [read_pin_request, read_field])
@given(value=JSON)
def test_a_field_of_ours_is_read_or_refused(read: Callable[[object], object], value: Any) -> None:
    try:
        read(value)
    except ValueError as error:
        assert str(error).encode("utf-8", "replace")


@settings(max_examples=400)
@given(CUSTOM)
@example({"hc_cut": "x"})
@example({"hc_cut": "0" * 32 + '{"head":64,"dropped":64,"cuts":[],"left_out":""}'})
def test_nothing_that_a_client_wrote_is_a_cut(custom: dict[str, Any]) -> None:
    os.environ[CUT_KEY_ENV] = "ab" * 32
    sampling = SimpleNamespace(custom_params=custom)
    req = SimpleNamespace(sampling_params=sampling, lora_id=None)
    pin_request_of(req)
    assert dropped_of(req) == 0 and earlier_of(req) is None
    taken = accept_cut(sampling)
    assert taken == ("hc_cut" not in custom)
    assert dropped_of(req) == 0 and earlier_of(req) is None


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda value: value.name)
def test_the_scheduler_takes_or_refuses_a_hostile_value(hostile: Any) -> None:
    recv = tokenized()
    target = recv.sampling_params if hostile.sampling else recv
    if hostile.field in type(target).__struct_fields__:
        setattr(target, hostile.field, hostile.value)
        wrong = entrance.request_wrong(recv, 1000, 64)
        assert wrong is None or wrong.encode()


def tokenized() -> TokenizedGenerateReqInput:
    sampling = SamplingParams(max_new_tokens=1)
    sampling.normalize(None)
    return TokenizedGenerateReqInput(
        rid="r", input_text="", input_ids=array("q", [1, 2]), input_embeds=None, mm_inputs=None,
        token_type_ids=None, sampling_params=sampling, return_logprob=False, logprob_start_len=-1,
        top_logprobs_num=0, token_ids_logprob=None, stream=False,
    )  # fmt: skip
