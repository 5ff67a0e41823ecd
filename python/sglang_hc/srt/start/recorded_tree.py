"""The tree of a server that records its run (`--hc-trace`): tells the recorder of its requests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

from sglang_hc.config import ConfigError, HcConfig
from sglang_hc.srt.engine.intake import serial_of
from sglang_hc.srt.ranks.replicas import place_of
from sglang_hc.srt.start.tier_factories import TierFactories
from sglang_hc.srt.tree.tree_backend import HcRadixCache
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tiers.recording import Recorder, RecordingHostTier, RecordingLookAhead
from sglang_hc.tiers.tiers import Tiers
from sglang_hc.tree.identity import Prefix, pack_tokens


class RecordedRadixCache(HcRadixCache):
    """HcRadixCache with a note of every arrival, look-up, admission and end."""

    def __init__(self, recorder: Recorder, params: Any, tiers: Tiers, *others: Any) -> None:
        super().__init__(params, tiers, *others)
        self.recorder = recorder
        recorder.watch(tiers.retention.pins)
        self.waiting.subscribe(recorder.gone)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        if params.req is not None:
            on_device = len(result.device_indices)
            request = serial_of(params.req)
            self.recorder.matched(request, len(params.key), on_device, result.host_hit_length)
        return result

    def prefetch_from_storage(self, rid: str, *args: Any) -> None:
        req = self.waiting.last_matched
        if req is not None and req.rid == rid:
            packed = pack_tokens(req.full_untruncated_fill_ids)
            self.recorder.arrived(serial_of(req), Prefix(req.extra_key, packed))
        super().prefetch_from_storage(rid, *args)

    def check_prefetch_progress(self, rid: str) -> bool:
        ready = super().check_prefetch_progress(rid)
        if not ready:
            self.recorder.passed_over(serial_of(self.waiting.last_asked))
        return ready

    def after_forward(self, forward_batch: Any, requests: list[Any]) -> None:
        for req in requests:
            from_tiers = req.cached_tokens_host + req.cached_tokens_storage
            self.recorder.admitted(serial_of(req), from_tiers, req.cached_tokens_storage)
        super().after_forward(forward_batch, requests)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        packed = pack_tokens((req.origin_input_ids + req.output_ids)[:kv_len_to_handle])
        super().cache_finished_req(req, is_insert, kv_len_to_handle=kv_len_to_handle)
        self.recorder.finished(serial_of(req), Prefix(req.extra_key, packed))

    def stats(self) -> dict[str, object]:
        return {**super().stats(), **self.recorder.stats()}

    def release_host_resources(self) -> None:
        super().release_host_resources()
        self.recorder.close()


def recording(
    config: HcConfig, runner: Any, pool: HostPool, fingerprint: bytes, clock: Callable[[], float]
) -> TierFactories:
    """The factories of a server that writes `--hc-trace`. pool: of the host tier. fingerprint: what
    identities of blocks begin with. clock: of decisions. Raises ConfigError.

    One file for each replica, and in it for each tensor-parallel rank: they show whether the ranks
    decided alike.
    """
    assert config.trace is not None
    path = Path(config.trace)
    path = path.with_name(path.name + place_of(runner).suffix)
    header = {
        "host_slots": pool.num_slots,
        "slot_bytes": pool.layout.slot_bytes,
        "layer_plan": str(pool.layout.plan),
        "page_size": runner.page_size,
        "eviction": config.eviction,
        "prefetch": config.prefetch,
    }
    try:
        recorder = Recorder(path, header, fingerprint, clock=clock)
    except FileExistsError:
        raise ConfigError(
            f"--hc-trace {path}: exists already; give another name or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"--hc-trace {path}: cannot be made ({error.strerror})") from None
    return TierFactories(
        partial(RecordingLookAhead, recorder),
        partial(RecordingHostTier, recorder),
        partial(RecordedRadixCache, recorder),
    )
