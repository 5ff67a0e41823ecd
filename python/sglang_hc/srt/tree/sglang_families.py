"""Prometheus families of SGLang's HiCache that our tiers fill, with the meaning they have there.

SGLang fills some of them for any tree: what is cached by source (`cached_tokens_total`), what the
device evicts (`evicted_tokens_total`), what its host pool holds (`hicache_host_used_tokens`). Those
of the copies between its tiers it fills where its own HiCache copies, so they are filled here.
docs/operating.md names those that nothing of ours has the meaning of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sglang_hc.forms import BLOCK_TOKENS
from sglang_hc.srt.binding import parallel

POOL = "kv"
"""SGLang's label of its host pool that has K and V."""

OF_STORAGE = {
    "prefetched_tokens_total": (
        ("disk_loaded_blocks", "remote_loaded_blocks"),
        "Prompt tokens successfully transferred from storage into host memory.",
    ),
    "backuped_tokens_total": (
        ("disk_saved_blocks", "remote_saved_blocks"),
        "Number of backuped tokens.",
    ),
}
"""Families of a storage back end: ours of which they are the sum, in tokens."""

Add = Callable[[int], object]


class _Sum(NamedTuple):
    names: tuple[str, ...]
    unit: int
    add: Add


class SglangFamilies:
    """Belongs to the scheduler thread."""

    def __init__(self, collector: Any, row_bytes: int, storage: str | None) -> None:
        """collector: SGLang's of its radix cache. row_bytes: of a token's saved state. storage:
        what is below host memory is called so; None for nothing."""
        self.restored = collector.observe_load_back_duration
        """Told of the seconds of each restore pass."""

        def tokens(increment: Callable[..., object]) -> Add:
            return lambda more: increment(num_tokens=more, pool=POOL)

        self._sums = [
            _Sum(("restored_tokens",), 1, tokens(collector.increment_load_back_num_tokens)),
            _Sum(("restored_bytes",), 1, collector.increment_load_back_num_bytes),
            _Sum(("kept_tokens",), 1, tokens(collector.increment_backup_num_tokens)),
            _Sum(("kept_tokens",), row_bytes, collector.increment_backup_num_bytes),
        ]
        if storage is not None:
            labels = _storage_labels(collector.labels, storage)
            for name, (ours, text) in OF_STORAGE.items():
                self._sums.append(_Sum(ours, BLOCK_TOKENS, _counter(name, text, labels)))
        self._seen = [0] * len(self._sums)
        for one in self._sums:
            one.add(0)  # zero is visible

    def publish(self, counts: Mapping[str, int]) -> None:
        """Add what was counted since the last call."""
        for index, one in enumerate(self._sums):
            now = sum(counts.get(name, 0) for name in one.names)
            if now > self._seen[index]:
                one.add((now - self._seen[index]) * one.unit)
                self._seen[index] = now


def _storage_labels(labels: Mapping[str, Any], storage: str) -> dict[str, str]:
    """Those that SGLang gives the numbers of a storage back end."""
    own = {name: value for name, value in labels.items() if name != "cache_type"}
    own |= {"storage_backend": storage, "pp_size": parallel.pp_size()}
    own |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    return {name: str(value) for name, value in own.items()}


def _counter(name: str, text: str, labels: Mapping[str, str]) -> Add:
    from prometheus_client import Counter

    return Counter(f"sglang:{name}", text, labelnames=tuple(labels)).labels(**labels).inc
