"""The rows of a forward pass: whose they are, and at which positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_hc.capture.capture import Segment
from sglang_hc.srt.engine.intake import serial_of


def prefilled(forward_batch: Any) -> list[tuple[int, int]]:
    """(new tokens, tokens before them) of each request of a pass that prefills."""
    new, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    return [(int(count), int(start)) for count, start in zip(new, before, strict=True)]


def segments_of(forward_batch: Any, requests: Sequence[Any]) -> list[Segment]:
    """The rows of each request of a pass, in their order; not for a verify pass."""
    if forward_batch.forward_mode.is_extend():
        lengths = prefilled(forward_batch)
    else:
        lengths = [(1, length - 1) for length in forward_batch.seq_lens_cpu.tolist()]
    segments, row = [], 0
    for req, (count, position) in zip(requests, lengths, strict=False):  # then padding
        segments.append(Segment(serial_of(req), position, row, count))
        row += count
    return segments
