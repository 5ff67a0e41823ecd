"""Checks of single option values: each raises ConfigError that says what is wanted instead.

None of them names its option; whoever asks does (`config.Flag.verify`).
"""

from __future__ import annotations

from pathlib import Path

from sglang_hc.errors import ConfigError, decode_json
from sglang_hc.forms import LayerPlan, PlanError
from sglang_hc.memory import GIB, available_memory, total_memory


def check_host_size(gib: float) -> None:
    """Raise ConfigError unless `gib` is a size that this machine's memory can hold."""
    if not 0 < gib < float("inf"):
        raise ConfigError(f"must be above 0 GiB, got {gib:g}")
    total = total_memory()
    if gib * GIB > total:
        raise ConfigError(
            f"{gib:g} GiB is larger than this machine's memory "
            f"({total / GIB:.1f} GiB); give at most what is free "
            f"({available_memory() / GIB:.1f} GiB now)"
        )


def check_forms(text: str) -> None:
    """Raise ConfigError unless `text` reads as a plan; whether it fits is known with the model."""
    if text in ("auto", "kv", "hidden"):
        return
    try:
        LayerPlan.parse(text, _sum_of_counts(text))
    except PlanError as error:
        raise ConfigError(str(error)) from None


def check_scrub(pace: float) -> None:
    """Raise ConfigError unless `pace` is a number of MB per second, 0 for none."""
    if not 0 <= pace < float("inf"):
        raise ConfigError(f"must be 0 or more MB per second, got {pace:g}")


def check_keep_first(tokens: int) -> None:
    """Raise ConfigError unless `tokens` is a length."""
    if tokens < 0:
        raise ConfigError(f"must be 0 or more tokens, got {tokens}")


def check_drop(share: float) -> None:
    """Raise ConfigError unless `share` is a part of the window."""
    if not 0.05 <= share <= 0.95:
        raise ConfigError(f"must be a share from 0.05 to 0.95, got {share:g}")


def check_reserve(tokens: int) -> None:
    """Raise ConfigError unless `tokens` leaves room for an answer."""
    if tokens < 1:
        raise ConfigError(f"must be 1 or more tokens, got {tokens}")


def check_disk(text: str) -> None:
    """Raise ConfigError unless `text` reads as DIR or DIR:SIZE_GB."""
    from sglang_hc.store.disk import DirectoryError, DirectorySpec

    try:
        DirectorySpec.parse(text)
    except DirectoryError as error:
        raise ConfigError(str(error).removeprefix("--hc-disk ")) from None


def check_trace(text: str) -> None:
    """Raise ConfigError unless a file can be made there. Whether it exists is seen at the start."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        what = "is a directory" if path.is_dir() else f"there is no directory {path.parent}"
        raise ConfigError(f"{text!r}: {what}; give a file to make")


def check_read_buffer(gib: float) -> None:
    """Raise ConfigError unless `gib` is a size; whether the device has room is known later."""
    if not 0 <= gib < float("inf"):
        raise ConfigError(f"must be 0 (off) or a number of GiB, got {gib:g}")


def check_remote_config(text: str) -> None:
    """Raise ConfigError unless `text` is a JSON object or names a file with one."""
    read_remote_config(text)


def read_remote_config(text: str | None) -> dict[str, object]:
    """The options of the remote store: a JSON object, or the path of a file that holds one."""
    if text is None:
        return {}
    where = "the text"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            text = Path(text).expanduser().read_text()
        except OSError as error:
            raise ConfigError(
                f"{where!r} is neither a JSON object nor a file that can be read ({error.strerror})"
            ) from None
    return decode_json(text, dict[str, object], where)


def check_profile(path: str) -> None:
    """Raise ConfigError unless `path` is a profile file; whose it is, is known with the model."""
    from sglang_hc.profile_file import read_profile

    read_profile(path)


def check_ttl(seconds: float) -> None:
    """Raise ConfigError unless `seconds` is a time to live; 0 is for ever."""
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"must be seconds, or 0 for never, got {seconds:g}")


def _sum_of_counts(text: str) -> int:
    counts = [part.rpartition(":")[2] for part in text.split(",")]
    return sum(int(count) for count in counts if count.isdecimal())
