"""Tokens of prompts by source, beside what clients are told of their prompts."""

from __future__ import annotations

from typing import Any

SOURCES = ("device", "host", "disk", "remote", "computed", "aborted")


class Told:
    """What SGLang tells clients of prompts that were served: the numbers of its replies, and its
    own split of them. For one engine in a process of its own."""

    def __init__(self, core: Any) -> None:
        self.prompts = self.device = self.host = self.below = 0
        self.details: list[Any] = []
        streamer, seen = type(core.scheduler.output_streamer), dict[int, Any]()
        stream, details = streamer.stream_output, streamer.get_cached_tokens_details

        def streamed(self: Any, reqs: list[Any], logprob: bool, skip_req: Any = None) -> Any:
            stream(self, reqs, logprob, skip_req)
            for req in reqs:
                if req is skip_req or id(req) in seen or not req.finished_output:
                    continue
                seen[id(req)] = req  # no other gets its id
                told.prompts += len(req.origin_input_ids)
                told.device += req.cached_tokens_device
                told.host += req.cached_tokens_host
                told.below += req.cached_tokens_storage

        def detailed(self: Any, req: Any) -> Any:
            found = details(self, req)
            if req.finished():
                told.details.append(found)
            return found

        told = self
        streamer.stream_output, streamer.get_cached_tokens_details = streamed, detailed


def by_source(core: Any) -> dict[str, int]:
    counts = core.tree.reporting.prompts.counts
    assert set(counts) == {f"prompt_tokens_{source}" for source in SOURCES}
    assert all(count >= 0 for count in counts.values())
    return {source: counts[f"prompt_tokens_{source}"] for source in SOURCES}


def check_sources(core: Any, told: Told) -> dict[str, int]:
    """Tokens by source, which add up to what clients were told, and agree with it."""
    found = by_source(core)
    assert sum(found.values()) == told.prompts, "sources do not add up to the prompts"
    assert (found["device"], found["host"]) == (told.device, told.host)
    assert found["disk"] + found["remote"] == told.below
    shown = [one for one in told.details if one is not None and "storage" in one]
    if core.tree.reporting.prompts.has_below:
        assert all(one["disk"] + one["remote"] == one["storage"] for one in shown)
        assert sum(one["disk"] for one in shown) == found["disk"]
    else:
        assert all(one["storage"] == 0 and "disk" not in one for one in shown)
    return found
