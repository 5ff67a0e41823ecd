"""What records the load of a server (`--hc-trace`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import to_builtins

from sglang_hc.config import HcConfig
from sglang_hc.errors import ConfigError
from sglang_hc.tiers.trace import Recorder, Served


def recorder_of(
    config: HcConfig, suffix: str, served: Served, fingerprint: bytes, clock: Callable[[], float]
) -> Recorder | None:
    """What writes `--hc-trace`; None without. suffix: of the file of a replica and rank.
    fingerprint: what identities of blocks begin with. clock: of decisions. Raises ConfigError."""
    if config.trace is None:
        return None
    path = Path(config.trace)
    path = path.with_name(path.name + suffix)
    try:
        return Recorder(path, to_builtins(served), fingerprint, clock=clock)
    except FileExistsError:
        raise ConfigError(
            f"--hc-trace {path}: exists already; give another name or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"--hc-trace {path}: cannot be made ({error.strerror})") from None
