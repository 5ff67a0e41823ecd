"""What a server says of its tiers, read from `/server_info` and `/metrics` and nothing else."""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from sglang_hc.metrics import PROMPT_TOKENS

SCRAPE_S = 5.0
"""Longest that an answer may take."""

SOURCES = PROMPT_TOKENS.values

UNREADABLE = (OSError, HTTPException, ValueError, TypeError, OverflowError)
"""What an answer raises that does not come, or is not what it should be."""

OF_SGLANG = {
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
    "device_usage": "sglang:token_usage",
}
"""Levels of SGLang's scheduler; the last one is a share."""


@dataclass
class Slow:
    """A slow restore pass; see `slowest_restorations` in docs/operating.md. Times in seconds."""

    seconds: float
    expected_seconds: float
    tokens: int
    reasons: dict[str, int]
    age_s: float


@dataclass
class Reading:
    """One look at a server, all its replicas together.

    error: why there is nothing else; None for an answer. note: what is missing of the answer.
    running, queued, device_usage: None without --enable-metrics. prompt_tokens: by source, since
    the start. numbers: all of `/server_info`'s that can be added, see docs/operating.md. decisions,
    reasons: how often each was made. slowest: the slowest first.
    """

    url: str
    error: str | None = None
    note: str | None = None
    model: str = ""
    layer_plan: str = ""
    replicas: int = 0
    running: int | None = None
    queued: int | None = None
    device_usage: float | None = None
    prompt_tokens: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    slowest: list[Slow] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; of a server that did not answer, which and why."""
        return asdict(self) if self.error is None else {"url": self.url, "error": self.error}


def scrape_all(urls: Sequence[str], key: str | None = None) -> list[Reading]:
    """A look at each server, at the same time. Waits for SCRAPE_S for each answer at most."""
    with ThreadPoolExecutor(max_workers=min(32, len(urls))) as pool:
        return list(pool.map(partial(scrape, key=key), urls))


def scrape(url: str, key: str | None = None) -> Reading:
    """A look at one server. key: its --api-key. Raises nothing: what fails is in the reading."""
    base = url.rstrip("/")
    try:
        info = json.loads(_get(f"{base}/server_info", key))
        reading = from_server_info(url, info)
    except UNREADABLE as error:
        return Reading(url, error=_why(error))
    try:
        add_metrics(reading, _get(f"{base}/metrics", key))
    except UNREADABLE as error:
        missing = isinstance(error, HTTPError) and error.code == 404
        reading.note = "started without --enable-metrics" if missing else f"/metrics: {_why(error)}"
    return reading


def from_server_info(url: str, info: Any) -> Reading:
    """What `/server_info` says. Raises one of UNREADABLE for an answer that is none of SGLang's."""
    if not isinstance(info, dict) or not isinstance(info.get("internal_states"), list):
        raise ValueError("not the /server_info of a server of SGLang")
    states = [state for state in info["internal_states"] if isinstance(state, dict)]
    parts = [state["hc"] for state in states if isinstance(state.get("hc"), dict)]
    model = str(info.get("served_model_name") or info.get("model_path") or "")
    reading = Reading(url, model=model, replicas=len(states))
    if not parts:
        reading.note = "runs without the tiers"
        return reading
    if all("throughput" in part for part in parts):
        reading.note = "has the state of running requests in host memory, and no tiers"
        return reading
    reading.layer_plan = str(parts[0].get("layer_plan", ""))
    numbers: Counter[str] = Counter()
    for part in parts:
        numbers.update({name: value for name, value in part.items() if _is_number(value)})
        slow = part.get("slowest_restorations", ())
        reading.slowest += [_slow(one) for one in slow if isinstance(one, dict)]
    reading.slowest.sort(key=lambda one: one.seconds, reverse=True)
    reading.numbers = dict(numbers)
    reading.prompt_tokens = {
        source: int(numbers.get(f"prompt_tokens_{source}", 0)) for source in SOURCES
    }
    reading.decisions = _named(numbers, "restore_decision_")
    reading.reasons = _named(numbers, "restore_reason_")
    return reading


def add_metrics(reading: Reading, page: str) -> None:
    """What only `/metrics` says. Raises ValueError for one that is none of Prometheus's."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(page):
        if family.name in OF_SGLANG.values():
            found[family.name] = [one.value for one in family.samples]
    levels = {name: found.get(family, []) for name, family in OF_SGLANG.items()}
    if levels["running"]:
        reading.running = int(sum(levels["running"]))
    if levels["queued"]:
        reading.queued = int(sum(levels["queued"]))
    if levels["device_usage"]:
        reading.device_usage = max(levels["device_usage"])


def _get(url: str, key: str | None) -> str:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=SCRAPE_S) as reply:
        text: str = reply.read().decode()
    return text


def _why(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"status {error.code}"
    reason = getattr(error, "reason", None) or error
    return str(reason) or type(error).__name__


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _named(numbers: Mapping[str, float], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): int(n) for name, n in numbers.items() if prefix in name}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _slow(one: Mapping[str, Any]) -> Slow:
    reasons = {str(name): int(count) for name, count in dict(one.get("reasons", {})).items()}
    numbers = (float(one.get(name, 0)) for name in ("seconds", "expected_seconds", "age_s"))
    seconds, expected, age = numbers
    return Slow(seconds, expected, int(one.get("tokens", 0)), reasons, age)
