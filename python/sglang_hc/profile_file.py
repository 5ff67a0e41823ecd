"""Profile files: cost models that are kept, given by a user or in the user's cache directory."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path

from sglang_hc.errors import ConfigError
from sglang_hc.policy.cost_model import CostModel, CostModelError, SourceTier

logger = logging.getLogger(__name__)

OPTION = "--hc-profile"


def read_profile(path: str, fingerprint: str | None = None) -> CostModel:
    """The cost model of a file. Raises CostModelError; see `CostModel.from_json`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CostModelError(f"{path}: cannot be read ({error})") from error
    return CostModel.from_json(text, path, fingerprint)


def load_given(path: str, fingerprint: str, tiers: tuple[SourceTier, ...]) -> CostModel:
    """The profile that the user named. `tiers`: those that this server reads from.

    Raises ConfigError when it cannot be read, is another server's, or lacks a tier.
    """
    try:
        cost = read_profile(path, fingerprint)
    except CostModelError as error:
        raise ConfigError(
            f"{OPTION}: {error}, or leave the option out to measure at start"
        ) from None
    for tier in tiers:
        if tier not in cost.copies:
            raise ConfigError(
                f"{OPTION} {path} has no costs for {tier.value}; write a new one with "
                f"sglang-hc profile --hc-{tier.value}, or leave the option out to measure at start"
            )
    return cost


def load_cached(fingerprint: str) -> CostModel | None:
    """What an earlier start measured; None when there is nothing that can be used."""
    path = cache_path(fingerprint)
    if not path.exists():
        return None
    try:
        return read_profile(str(path), fingerprint)
    except CostModelError as error:
        logger.warning("sglang-hc: measuring again, the cached profile cannot be used: %s", error)
        return None


def save_cached(cost: CostModel) -> None:
    """Keep `cost` for later starts. A cache that cannot be written is said and does no harm."""
    path = cache_path(cost.fingerprint)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save(cost, path)
    except OSError as error:
        logger.warning("sglang-hc: the profile is not kept for later starts: %s", error)


def save(cost: CostModel, path: Path) -> None:
    """Write a profile file, whole or not at all. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(cost.to_json() + "\n")
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def cache_path(fingerprint: str) -> Path:
    """Where the profile of this model on this machine is cached."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
    return Path(base) / "sglang-hc" / f"profile-{digest}.json"
