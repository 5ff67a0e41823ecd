"""What a record of a server without tiers holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_hc.srt.requests.recording import Recorded


class Noted:
    """In the place of a Recorder."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.open: set[Any] = set()

    def arrived(self, request: Any, prompt: Any) -> None:
        self.said.append(f"arrive {prompt.num_tokens}")
        self.open.add(request)

    def is_open(self, request: Any) -> bool:
        return request in self.open

    def answered(self, request: Any) -> None:
        self.said.append("first")

    def finished(self, request: Any, computed: Any) -> None:
        self.said.append(f"finish {computed.num_tokens}")
        self.open.discard(request)


def request(ids: list[int], **other: Any) -> Any:
    answered: list[int] = []
    return SimpleNamespace(
        origin_input_ids=ids, output_ids=answered, extra_key=None, cache_salt=None, lora_id=None,
        finished=lambda: len(answered) > 2, rid="a", **other,
    )  # fmt: skip


def talk(req: Any) -> list[str]:
    noted = Noted()
    recorded = Recorded(noted)  # type: ignore[arg-type]
    recorded.queued(req)
    for token in (1, 2, 3, 4):
        req.output_ids.append(token)
        recorded.processed(req)
    return noted.said


def test_a_request_is_told_of_from_its_arrival_to_its_end() -> None:
    assert talk(request([5] * 7)) == ["arrive 7", *["first"] * 3, "finish 9"]


def test_images_are_left_out() -> None:
    """SGLang gives them ids of 62 bits, which no record can hold: an error at each, and where
    several ranks run, the end of the scheduler."""
    assert talk(request([5, 1 << 61], multimodal_inputs=object())) == []
