"""What records the load of a server (`--hc-trace`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglang_hc.config import HcConfig
from sglang_hc.errors import ConfigError
from sglang_hc.store.host_pool import HostPool
from sglang_hc.tiers.trace import Recorder


def recorder_of(
    config: HcConfig, suffix: str, pool: HostPool, page_size: int, fingerprint: bytes,
    clock: Callable[[], float],
) -> Recorder | None:  # fmt: skip
    """What writes `--hc-trace`; None without. suffix: of the file of a replica and rank. pool: of
    the host tier. fingerprint: what identities of blocks begin with. clock: of decisions. Raises
    ConfigError."""
    if config.trace is None:
        return None
    path = Path(config.trace)
    path = path.with_name(path.name + suffix)
    header = {
        "host_slots": pool.num_slots,
        "slot_bytes": pool.layout.slot_bytes,
        "layer_plan": str(pool.layout.plan),
        "page_size": page_size,
        "eviction": config.eviction,
        "prefetch": config.prefetch,
    }
    try:
        return Recorder(path, header, fingerprint, clock=clock)
    except FileExistsError:
        raise ConfigError(
            f"--hc-trace {path}: exists already; give another name or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"--hc-trace {path}: cannot be made ({error.strerror})") from None
