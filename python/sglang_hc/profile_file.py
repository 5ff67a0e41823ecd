"""Profile files: cost models that are kept, given by a user or in the user's cache directory."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from dataclasses import replace
from pathlib import Path

import msgspec

from sglang_hc.errors import ConfigError, convert, decode_json
from sglang_hc.policy.cost_model import CostModel, SourceTier

logger = logging.getLogger(__name__)

OPTION = "--hc-profile"

FORMAT = "sglang-hc cost model"
VERSION = 5
"""Before 5 nothing was learned; before 4 copies were measured into one layer, whose rows stay in
the caches; before 3 a copy from a lower tier went on to the device."""

ANY_SERVER = "any"
"""Fingerprint of a profile that its writer answers for: every server takes it."""


def encode(cost: CostModel) -> str:
    """The text of a profile file: the fields of `CostModel`; an infinite `ahead` is null."""
    values = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(cost)}
    return msgspec.json.format(msgspec.json.encode(values)).decode()


def decode(text: str, where: str, fingerprint: str | None = None) -> CostModel:
    """The cost model of a profile file's text. `where` names the file in errors.

    fingerprint: of this server; None accepts a profile of anything. Raises ConfigError for a
    missing or nonsense field, another version, or the fingerprint of another server.
    """
    values = decode_json(text, dict[str, object], where)
    if values.get("format") != FORMAT:
        raise ConfigError(f"{where}: not a cost model; give a file of sglang-hc profile")
    if values.get("version") != VERSION:
        raise ConfigError(
            f"{where}: format version {values.get('version')}, this release reads version "
            f"{VERSION}; measure again with this version"
        )
    if values.get("ahead", 0) is None:
        del values["ahead"]
    cost = convert(values, CostModel, where)
    if fingerprint is not None and cost.fingerprint not in (fingerprint, ANY_SERVER):
        raise ConfigError(
            f"{where}: measured for {cost.fingerprint!r}, but this server is {fingerprint!r}; "
            "write a new one here with sglang-hc profile"
        )
    return cost


def read_profile(path: str, fingerprint: str | None = None) -> CostModel:
    """The cost model of a file. Raises ConfigError; see `decode`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}); give a file of sglang-hc profile"
        ) from error
    return decode(text, path, fingerprint)


def load_given(path: str, fingerprint: str, tiers: tuple[SourceTier, ...]) -> CostModel:
    """The profile that the user named. `tiers`: those that this server reads from.

    Raises ConfigError when it cannot be read, is another server's, or lacks a tier.
    """
    try:
        cost = read_profile(path, fingerprint)
    except ConfigError as error:
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
    except ConfigError as error:
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


CLOSE_S = 5.0
"""Longest wait for a file system that does not answer when the server ends."""


class CachedProfile:
    """Keeps what a server learns for its next start. Belongs to the scheduler thread; it writes in
    a thread of its own, because the cache may be on a file system that does not answer."""

    def __init__(self, cost: CostModel, measured: CostModel) -> None:
        """cost: what the server decides by, which learns. measured: what it was made of for layers
        that differ, or with the weights of this start."""
        self._cost = cost
        self._measured = measured
        self._kept_changes = cost.changes
        self._writer: threading.Thread | None = None

    def poll(self) -> None:
        """Begin to write the costs if they have changed by much and nothing is being written."""
        if self._cost.changes != self._kept_changes and not self._is_writing:
            self._write()

    def close(self) -> None:
        """Write what was learned, and wait for it, but not for ever."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)
        if self._cost.learned and not self._is_writing:
            self._write().join(CLOSE_S)

    @property
    def _is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def _write(self) -> threading.Thread:
        self._kept_changes = self._cost.changes
        learned = dict(self._cost.learned)  # the server goes on learning
        now = replace(self._measured, learned=learned, plan=self._cost.plan)
        self._writer = threading.Thread(target=save_cached, args=(now,), daemon=True)
        self._writer.start()
        return self._writer


def save(cost: CostModel, path: Path) -> None:
    """Write a profile file, whole or not at all. Raises OSError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        part.write_text(encode(cost) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def cache_path(fingerprint: str) -> Path:
    """Where the profile of this model on this machine is cached."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
    return Path(base) / "sglang-hc" / f"profile-{digest}.json"
