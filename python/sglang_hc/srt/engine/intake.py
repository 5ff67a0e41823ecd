"""What the scheduler's requests are told apart by.

A request is an object of SGLang's; its `rid` is a string that a client chooses. A client that went
away and sends again, or two tokenizer workers, make two requests with one rid that are alive at
once. So nothing of ours is found by a rid. SGLang hands some calls of the tree a handle of the
request alone; whose it is, `SchedulerQueue` knows from what SGLang did just before.
"""

from __future__ import annotations

import itertools
from typing import Any

from sglang_hc.queue.requests import Serial

SERIAL = "hc_serial"
"""Attribute of a request that holds its number."""

_serials = itertools.count()


def serial_of(req: Any) -> Serial:
    """The number of a request, given when it is first asked for. It keeps it when it is retracted
    and queued again."""
    serial: Serial | None = getattr(req, SERIAL, None)
    if serial is None:
        serial = Serial(next(_serials))
        setattr(req, SERIAL, serial)
    return serial
