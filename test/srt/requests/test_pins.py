"""One answer about pins for a server of several replicas."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_hc.policy.pins import MAX_PIN_S
from sglang_hc.srt.requests.pins import joined, read_pin_request

NOT_FOUND: dict[str, Any] = {"status": 404, "error": {"message": "no tier has a block"}}


def listing(blocks: int) -> dict[str, Any]:
    pins = [{"session": f"s{blocks}", "blocks": blocks}] if blocks else []
    return {"status": 200, "pins": pins, "blocks": blocks, "max_blocks": 100}


def test_what_replicas_have_is_added_up_and_so_is_what_they_may_have() -> None:
    together = joined([listing(70), listing(0), listing(60)])
    assert together["blocks"] == 130 <= together["max_blocks"] == 300
    assert [pin["session"] for pin in together["pins"]] == ["s70", "s60"]


def test_one_replica_that_could_is_enough() -> None:
    pinned = {"status": 200, "session": "s", "blocks": 3, "ttl_s": 5.0}
    assert joined([NOT_FOUND, pinned]) == pinned
    assert joined([pinned, pinned]) == {**pinned, "blocks": 6}
    ended = {"status": 200, "session": "s"}
    assert joined([ended, ended]) == ended, "an answer without blocks gets none"
    assert joined([NOT_FOUND, NOT_FOUND]) == NOT_FOUND


def test_a_pin_may_last_so_long_and_its_session_have_so_long_a_name() -> None:
    longest = {"session": "s" * 256, "ttl_s": MAX_PIN_S}
    assert read_pin_request(longest).ttl_s == MAX_PIN_S
    beyond = {"session": "s" * 257}, {"session": ""}, {"ttl_s": MAX_PIN_S + 1}, {"ttl_s": 0}
    for wrong in beyond:
        with pytest.raises(ValueError, match="hc_pin"):
            read_pin_request(longest | wrong)
