"""Values that no server may fall over, handed to SGLang's real scheduler as if no tokenizer had
looked at them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi.responses import JSONResponse
from sglang.srt.managers.io_struct import dec_hook, enc_hook, ext_hook

from sglang_hc.srt.engine import guard
from sglang_hc.srt.requests import pins
from support.core import Core, run_in_child
from support.hostile import HOSTILE
from support.prompts import SMALL, prompt

FLAGS = (
    *("--hc-forms", "kv", *SMALL, "--hc-host-size-gb", "0.02"),
    *("--hc-overflow", "reembed", "--hc-overflow-reserve", "64"),
)
PROMPT = prompt(6, 150)


def can_be_sent(sent: Any) -> bool:
    """Whether SGLang's wire carries a request as it is: what has another type it does not."""
    try:
        message = msgspec.msgpack.encode(sent, enc_hook=enc_hook)
        msgspec.msgpack.decode(message, type=type(sent), dec_hook=dec_hook, ext_hook=ext_hook)
    except UnicodeError:
        return True  # pickled it comes through
    except Exception:
        return False
    return True


def can_be_shown(answer: Any) -> bool:
    """As the answer to GET /hc/pins."""
    try:
        JSONResponse(answer)
    except ValueError:
        return False
    return True


def all_hostile(folder: str) -> tuple[list[str], dict[str, int]]:
    """What is wrong, one line for each value; what was counted."""
    core = Core(*FLAGS, "--hc-disk", f"{folder}:0.1")
    wanted, wrong = core.ask(PROMPT, 4).tokens, []
    for hostile in HOSTILE:
        rid = core.submit(PROMPT, 4)
        sent = core.inbox[-1]
        into = sent.sampling_params if hostile.sampling else sent
        if hostile.field not in type(into).__struct_fields__:
            core.inbox.pop()
            continue
        setattr(into, hostile.field, hostile.value)
        if not can_be_sent(sent):
            core.inbox.pop()
            continue
        core.run()
        req = core.requests.get(rid)
        aborted = req is not None and req.finished_reason.to_json()["type"] == "abort"
        names = hostile.field in {"extra_key", "cache_salt", "custom_params", "session_id"}
        if names and not aborted and list(req.output_ids_through_stop) != wanted:
            wrong.append(f"{hostile.name}: other tokens")
        if core.ask(PROMPT, 4).tokens != wanted:
            wrong.append(f"{hostile.name}: other tokens for the next request")
        core.settle()
        listing = pins.answer(core.tree.tiers.retention, "hc_pins/list", {"namespace": None})
        if listing["status"] != 200 or not can_be_shown(listing):
            wrong.append(f"{hostile.name}: its pins cannot be listed")
    return wrong, dict(guard.counters)


def test_no_value_ends_the_scheduler(models: None, tmp_path: Path) -> None:
    wrong, counted = run_in_child(all_hostile, str(tmp_path))
    assert wrong == []
    assert counted["refused_requests"] > 5
    assert counted["ignored_fields"] >= 3  # three cuts that are not the tokenizer's
    assert "guarded_errors" not in counted
