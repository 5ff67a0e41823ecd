"""Who may write to a folder that a cache is kept in: whoever can, can serve what they like from it.
Names of blocks and digests stop accidents, not people; a key that servers share stops those.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from sglang_hc.errors import ConfigError

LEAST_KEY_BYTES = 16


def distrusted(folder: str) -> str | None:
    """Why this folder must not hold a cache; None when only its group, this user and root can write
    there. A group may: whoever gives it that right has chosen its members. Raises OSError.
    """
    target = os.stat(folder)
    if target.st_mode & stat.S_IWOTH:
        return "everybody can write to it"
    for found in (os.lstat(folder), target):  # who owns a link leads us where he likes
        if found.st_uid not in (0, os.geteuid()) and found.st_uid != _owner_of_ours(folder):
            return f"user {found.st_uid} owns it"
    return None


def _owner_of_ours(folder: str) -> int:
    """To whom a file system that renames users, such as NFS, says that our files belong."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid
    except OSError:
        return os.geteuid()


def read_remote_key(path: str) -> bytes:
    """The bytes of the file of `--hc-remote-key`. Raises ConfigError, which never names them."""
    try:
        at_once = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe may have nobody at its end
        with open(os.open(Path(path).expanduser(), at_once), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read() if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be read ({error.strerror}); give a file") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"{path!r} can be used by others; run chmod 600 on it")
    if len(secret) < LEAST_KEY_BYTES:
        raise ConfigError(
            f"{path!r} holds {len(secret)} bytes; give a file of at least {LEAST_KEY_BYTES}, for "
            "example made by: head -c 32 /dev/urandom"
        )
    return secret
