"""Namespaces: whose state a prefix is, beside its tokens.

A namespace is packed from its parts as `TAG LENGTH : VALUE`, in the order of `Namespace`'s fields:

    s4:acmek1:2        cache_salt "acme", extra_key "2"; no client can write it as one key

A length is a number of characters. Only what is packed in exactly this way is read back as parts,
so that no two lists of parts have one name. Pure: no I/O.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import NamedTuple

MAX_KEY_BYTES = 1024
"""Longest `cache_salt` and longest `extra_key`, in bytes of UTF-8."""

_PART = re.compile(r"([skhcaw])(0|[1-9][0-9]*):", re.ASCII)


class Namespace(NamedTuple):
    """The parts of a namespace; None where there is none, which is not the empty string.

    salt, key: `cache_salt` and `extra_key` of the client. hashed: in place of a key that a server
    cannot keep as it is. cut: names what was dropped from the prompt (`tree.cuts`). adapter: digest
    of the adapter's content. weights: digest of the model's, where they are not those that it was
    started with, which the fingerprint covers.
    """

    salt: str | None = None
    key: str | None = None
    hashed: str | None = None
    cut: str | None = None
    adapter: str | None = None
    weights: str | None = None

    @classmethod
    def of(cls, text: str | None) -> Namespace:
        """The parts of a packed namespace. A text that is not one is a client's key."""
        if text is None:
            return cls()
        found: dict[str, str] = {}
        place = 0
        while place < len(text):
            head = _PART.match(text, place)
            if head is None or len(head[2]) > len(str(len(text))):
                return cls.of_key(text)
            place = head.end() + int(head[2])
            found[head[1]] = text[head.end() : place]
        parts = cls(*map(found.get, "skhcaw"))
        return parts if parts.pack() == text else cls.of_key(text)

    @classmethod
    def of_key(cls, key: str) -> Namespace:
        """Of a key that nobody has checked: by a digest if it is too long, or no UTF-8."""
        raw = key.encode("utf-8", "surrogatepass")
        if len(raw) <= MAX_KEY_BYTES and _is_text(key):
            return cls(key=key)
        return cls(hashed=hashlib.blake2b(raw, digest_size=16).hexdigest())

    def pack(self) -> str | None:
        """The name that requests and blocks carry; None for a namespace without parts."""
        given = [(tag, part) for tag, part in zip("skhcaw", self, strict=True) if part is not None]
        if not given:
            return None
        return "".join(f"{tag}{len(part)}:{part}" for tag, part in given)

    @property
    def client(self) -> Namespace:
        """The parts that a client chose: whose state it is, whatever was cut or made it."""
        return self._replace(cut=None, adapter=None, weights=None)


@lru_cache(maxsize=4096)
def weights_of(namespace: str | None) -> str | None:
    """The weights that made what is in a packed namespace; see `Namespace`."""
    return Namespace.of(namespace).weights


def client_namespace(salt: object, key: object) -> str | None:
    """The namespace of a client's `cache_salt` and `extra_key`, each None where it was not sent.

    Raises ValueError, for users, for what is no text, no UTF-8 or longer than MAX_KEY_BYTES.
    """
    for name, part in (("cache_salt", salt), ("extra_key", key)):
        if part is None:
            continue
        if not isinstance(part, str):
            raise ValueError(f"{name} must be a string, not {type(part).__name__}")
        if not _is_text(part):
            raise ValueError(f"{name} has a lone surrogate; send text that UTF-8 can encode")
        size = len(part.encode())
        if size > MAX_KEY_BYTES:
            raise ValueError(f"{name} has {size} bytes; at most {MAX_KEY_BYTES} are taken")
    assert salt is None or isinstance(salt, str)
    assert key is None or isinstance(key, str)
    return Namespace(salt=salt, key=key).pack()


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
