"""A server in this process whose disk, or remote store, is as fast as a benchmark says.

SGLang's scheduler is driven request by request (harness/core.py), without overlap scheduling:
that launches the next pass before it looks at the last one's result, and on a CPU a launch is the
whole pass, so every first token would wait for a decoding pass that a GPU does not wait for. The
disk is a real one with a token bucket before its reads.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_hc import profile_file
from sglang_hc.forms import BLOCK_TOKENS, LayerPlan
from sglang_hc.policy.correction import Correction, Resource
from sglang_hc.policy.cost_model import CostModel, SourceTier, TierCopy
from sglang_hc.policy.fit import Fit
from sglang_hc.store.disk import DiskStore
from sglang_hc.store.disk.backend import DirectBackend, File
from sglang_hc.tree.identity import Prefix, pack_tokens

NEW = 64
"""Tokens of a prompt behind its history, a whole number of blocks."""

POOL_SPARE = 1024
PRIMED = 2048
"""Tokens that are computed at a time when a history is stored: a remote store queues few blocks."""


LEARNED = 20
"""Requests that a server has served before anything is measured: from them it learns its costs."""


class Bucket:
    """Lets so many bytes a second through, whoever reads; 0 for any number."""

    def __init__(self) -> None:
        self._rate = self._free = 0.0
        self._lock = threading.Lock()

    def set(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s

    def pass_through(self, count: int) -> None:
        rate = self._rate
        if not rate:
            return
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class MeteredFile:
    """A file whose reads pass a bucket."""

    def __init__(self, file: File, bucket: Bucket) -> None:
        self._file, self._bucket = file, bucket

    def read(self, buffers: Sequence[memoryview], offset: int) -> int:
        self._bucket.pass_through(sum(map(len, buffers)))
        return self._file.read(buffers, offset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class MeteredBackend(DirectBackend):
    """The real disk behind a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self._bucket = bucket

    def open(self, path: str) -> File:
        return MeteredFile(super().open(path), self._bucket)


def meter_disk(bucket: Bucket) -> None:
    """Every disk store that this process opens from now on reads through the bucket."""
    opened = DiskStore.open
    DiskStore.open = lambda *args, **options: opened(  # type: ignore[method-assign,misc]
        *args, **options, backend=MeteredBackend(bucket)
    )


class SourceServer:
    """SGLang's scheduler with the tiers, and below host memory a disk or a shared directory."""

    def __init__(self, model: str, form: str, longest: int, folder: str, store: str) -> None:
        """folder: an existing one, for the blocks. store: `disk` or `file`."""
        from benchmark.harness.core import Core

        # Costs are measured now, not those of another start: a machine's speed drifts.
        shutil.rmtree(Path(folder, "cache"), ignore_errors=True)
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        self.bucket = Bucket()
        below = ["--hc-disk", f"{folder}/disk:8"]
        if store == "file":
            Path(folder, "file").mkdir(exist_ok=True)
            below = [
                "--hc-remote",
                "file",
                "--hc-remote-config",
                json.dumps({"dir": f"{folder}/file:8"}),
            ]
        meter_disk(self.bucket)
        self.core = Core(
            "--hc-forms", form, *below, "--max-total-tokens", str(longest + POOL_SPARE),
            "--dtype", "float32", "--hc-host-size-gb", "1.5",
            "--chunked-prefill-size", str(longest + POOL_SPARE),
            # SGLang sets aside memory for the chunk, as on a GPU: of 24 GiB nothing would be left.
            "--disable-overlap-schedule", "--mem-fraction-static", "0.5",
            model=model, profile=None, SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE="0",
            SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY="0",
        )  # fmt: skip
        self.tier = SourceTier.REMOTE if store == "file" else SourceTier.DISK
        self.tiers = self.core.tree.tiers
        self.planner = self.tiers.restorer.planner
        self.costs = self.planner.costs
        assert self.costs is not None, "the server could not measure its costs"
        self._profile: CostModel = replace(self.costs)
        layout = self.tiers.restorer.path.pool.layout
        self.plan: LayerPlan = layout.plan
        self.token_bytes: float = layout.slot_bytes / BLOCK_TOKENS
        self.vocabulary: int = self.core.scheduler.tp_worker.model_runner.model_config.vocab_size
        self._first_token: dict[str, float] = {}
        streamer = type(self.core.scheduler.output_streamer)
        streamer.stream_output = self._noting(streamer.stream_output)

    @property
    def model(self) -> CostModel:
        """The costs that the server decides by now."""
        costs: CostModel = self.costs
        return costs

    @property
    def profile(self) -> dict[str, Any]:
        """What was measured at the start and learned, as `sglang-hc profile` writes it."""
        fields: dict[str, Any] = json.loads(profile_file.encode(self._profile))
        return fields

    @property
    def meetings(self) -> dict[str, int]:
        """What was counted of histories that were met in the middle."""
        seen = self.core.tree.stats()
        names = ("meetings", "meetings_restored", "meetings_cut_off")
        return {name: seen.get(name, 0) for name in names}

    def balance(self, history: int) -> float:
        """Bytes per second at which reading a history takes as long as computing it."""
        seconds = self.plan.num_layers * self._profile.prefill_layer(history, 0)
        return self.token_bytes * history / seconds

    def throttle(self, bytes_per_s: float) -> None:
        """The source delivers so much; 0 for as much as it can. The costs of a disk say so, as if
        it had been measured; those of a remote store follow from its reads."""
        self.bucket.set(bytes_per_s)
        if self.tier is SourceTier.REMOTE:
            return
        self.costs.copies = self._profile.copies
        self.costs.learned = dict(self._profile.learned)
        if bytes_per_s:
            self.costs.learned[Resource.DISK] = 1.0
            line = Fit(0.0, self.token_bytes / (self.plan.hidden + self.plan.kv) / bytes_per_s)
            copy = TierCopy(line, None if self.costs.project is None else line)
            self.costs.copies = {**self.costs.copies, SourceTier.DISK: copy}

    def gbps(self, history: int) -> float:
        """What the costs say of the source, in GB/s."""
        seconds = self.model.copy_stored(self.tier, self.plan, history)
        return self.token_bytes * history / seconds / 1e9

    def store_history(self, tokens: Sequence[int]) -> None:
        """Compute a history and store all its blocks below host memory, and only there."""
        for stop in [*range(PRIMED, len(tokens), PRIMED), len(tokens)]:
            self.core.ask(tokens[:stop], 1)
            self.core.settle()
        _, path = self.tiers.host.tree.path(Prefix(None, pack_tokens(tokens)))
        held = sum(map(self.tiers.disk.holds, path.block_ids))
        assert held == len(path.block_ids), f"{held} of {len(path.block_ids)} blocks were stored"
        self.forget()

    def learn(self, prompts: Sequence[Sequence[int]]) -> None:
        """Serve LEARNED requests, a third of them computed and the others read, and keep to the
        costs that are known by then."""
        for number in range(LEARNED):
            prompt = prompts[number // 3 % len(prompts)]
            self.ttft(prompt, "serial" if number % 3 else "recompute")
        self.believe()

    def believe(self) -> None:
        """Keep to the costs that are known now."""
        self.core.believe_profile()
        self._profile = replace(self.costs)

    def price_store(self, prompt: Sequence[int], bytes_per_s: float) -> None:
        """Forget what reads from the remote store have told, and read once."""
        self.throttle(bytes_per_s)
        self.costs.learned.pop(Resource.REMOTE, None)
        self.costs._corrections[Resource.REMOTE] = Correction(None, math.inf)
        del self.costs.observe
        self.ttft(prompt, "serial")
        self.believe()

    def take_pages(self) -> None:
        """Take the memory of both pools from the system, which are empty. Where there is a GPU it
        is taken before the first request too: its own at once, the host's as it is pinned."""
        self.tiers.restorer.path.pool.bytes.fill(0)
        device = self.core.scheduler.token_to_kv_pool_allocator.get_kvcache()
        for layer in (*device.k_buffer, *device.v_buffer):
            layer.zero_()

    def close(self) -> None:
        """End in good order: everything that was stored is found again."""
        self.tiers.close()

    def forget(self) -> None:
        """Device and host memory hold nothing."""
        self.core.settle()
        assert self.core.scheduler.flush_cache()

    def ttft(self, prompt: Sequence[int], arm: str) -> float:
        """Seconds from the arrival of a request to its first token, nothing but the source warm.

        arm: `recompute` (nothing of it is stored), `serial` (all is read, then restored) or
        `overlapped` (what the server does).
        """
        disk, planner = self.tiers.disk, self.planner
        wants, disk._io.wants = disk._io.wants, lambda block_id: False  # nothing is written
        planner.always = arm == "serial"
        salt = f"never stored {time.monotonic()}" if arm == "recompute" else None
        with _patience(600.0 if arm == "serial" else None):
            begin = time.perf_counter()
            rid = self.core.submit(prompt, 1, salt)
            self.core.run()
        reply = self.core.reply(rid)
        self.forget()  # the new tokens' blocks are saved meanwhile, and not written either
        planner.always, disk._io.wants = False, wants
        assert len(prompt) - reply.cached >= NEW, "the new tokens were stored"
        assert arm != "serial" or len(prompt) - reply.cached == NEW, "not everything was read"
        return self._first_token.pop(rid) - begin

    def _noting(self, stream: Callable[..., Any]) -> Callable[..., Any]:
        """Note when the first token of a request leaves the scheduler."""

        def stream_output(streamer: Any, reqs: Sequence[Any], *args: Any, **options: Any) -> Any:
            now = time.perf_counter()
            for req in reqs:
                if req.output_ids:
                    self._first_token.setdefault(req.rid, now)
            return stream(streamer, reqs, *args, **options)

        return stream_output


@contextlib.contextmanager
def _patience(seconds: float | None) -> Iterator[None]:
    """The serial arm waits for all its blocks, however slow the source is."""
    from sglang_hc.queue import prefetch
    from sglang_hc.store import lower_tier

    before = prefetch.PATIENCE, lower_tier.READ_DEADLINE_S
    if seconds is not None:
        prefetch.PATIENCE = lower_tier.READ_DEADLINE_S = seconds
    try:
        yield
    finally:
        prefetch.PATIENCE, lower_tier.READ_DEADLINE_S = before
