"""What passes with state in host memory took, beside what they were expected to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from sglang_hc.policy.streamed_pass import Load, PassTimes, Split
from sglang_hc.policy.streaming_plan import StreamingPlan


class Rows(Protocol):
    """Tokens that were attended to, by how they are kept."""

    @property
    def device_act(self) -> int: ...

    @property
    def host_act(self) -> int: ...

    @property
    def kv(self) -> int: ...


class Passed(Protocol):
    """What passed since the start; see `hybrid.units.Passed`."""

    passes: int
    timed: int
    seconds: float
    rounds: int
    kv_in: int
    act_in: int
    kv_out: int
    act_out: int
    new: int

    @property
    def rows(self) -> Rows: ...


@dataclass(frozen=True)
class Report:
    """Of the passes of one server."""

    plan: StreamingPlan
    passed: Passed

    @property
    def pass_seconds(self) -> float | None:
        """Measured, of a pass; None before the first one."""
        return self.passed.seconds / self.passed.timed if self.passed.timed else None

    @property
    def times(self) -> PassTimes | None:
        """What link and device work in a pass of these bytes and tokens, by the costs; None before
        the first one. What prompts attend to is left out."""
        model, passed = self.plan.model, self.passed
        if not passed.passes:
            return None
        rows = passed.rows
        counts = rows.kv, rows.host_act, rows.device_act
        kv, act, kept = (count / passed.passes for count in counts)
        split = Split(kv, act, kept)
        load = Load(0, split.tokens, passed.new / passed.passes)
        return model.times(load, split, round(passed.rounds / passed.passes))

    def stats(self) -> dict[str, Any]:
        """For /server_info. Bytes and counts since the start, seconds of a pass."""
        settled, passed, served = self.plan.streaming, self.passed, self.plan.served
        times, seconds = self.times, self.pass_seconds
        return {
            "tokens": settled.tokens,
            "act_tokens": settled.act_tokens,
            "device_act_tokens": settled.device_act,
            "rows": settled.rows,
            "passes": passed.passes,
            "rounds": passed.rounds,
            "pass_seconds": seconds,
            "link_seconds": times and times.link,
            "compute_seconds": times and times.compute,
            "bound": times and times.bound,
            "bytes": self.bytes(),
            "planned": {
                "requests": served.load.requests,
                "rounds": served.rounds,
                "pass_seconds": served.seconds,
                "bound": served.times.bound,
                "tokens_per_second": served.tokens_per_second,
            },
        }

    def bytes(self) -> dict[str, int]:
        """That came to the device, and that went home."""
        passed, model = self.passed, self.plan.model
        return {
            "weights_in": round(passed.passes * model.layers * model.weights),
            "kv_in": passed.kv_in,
            "act_in": passed.act_in,
            "kv_out": passed.kv_out,
            "act_out": passed.act_out,
        }

    def levels(self) -> dict[str, float]:
        """For the metrics: `metrics.LEVELS`."""
        settled, times, seconds = self.plan.streaming, self.times, self.pass_seconds
        found = {
            "throughput_tokens": float(settled.tokens),
            "throughput_act_tokens": float(settled.act_tokens),
            "throughput_device_act_tokens": float(settled.device_act),
        }
        if times is not None:
            found["throughput_link_seconds"] = times.link
            found["throughput_compute_seconds"] = times.compute
        if seconds is not None:
            found["throughput_pass_seconds"] = seconds
        return found

    def counts(self) -> dict[str, int]:
        """For the metrics: `metrics.COUNTS`."""
        found = {f"throughput_{name}_bytes": count for name, count in self.bytes().items()}
        passed = self.passed
        return found | {"throughput_passes": passed.passes, "throughput_rounds": passed.rounds}
