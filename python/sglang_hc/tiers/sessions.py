"""What sessions left last, by the names that clients gave them: so that a session can be retained,
fetched, demoted or forgotten without its tokens.

Names belong to their namespace. As many tokens are known as the host tier holds, of MAX_SESSIONS
sessions; those that were used longest ago are forgotten first. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from sglang_hc.policy.pins import MAX_SESSIONS
from sglang_hc.tree.identity import Prefix
from sglang_hc.tree.namespaces import Namespace


class _Known(NamedTuple):
    prefix: Prefix
    used: float


class Sessions:
    """Paths by name and client, as `namespaces.client_namespace` names it."""

    def __init__(self, max_tokens: int, ttl: float = 0.0, max_sessions: int = MAX_SESSIONS) -> None:
        """ttl: seconds after which a session that nobody used is forgotten; 0 for never."""
        self._max_tokens, self._max_sessions, self._ttl = max_tokens, max_sessions, ttl
        self._known: OrderedDict[tuple[str | None, str], _Known] = OrderedDict()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: str, prefix: Prefix, now: float) -> None:
        """A session has left this path, in place of what it left before."""
        key = Namespace.of(prefix.namespace).client.pack(), name
        self._pop(key)
        self._known[key] = _Known(prefix, now)
        self._tokens += prefix.num_tokens
        while self._tokens > self._max_tokens or len(self._known) > self._max_sessions:
            self._pop(next(iter(self._known)))

    def of(self, client: str | None, name: str) -> Prefix | None:
        """What a session left last; None for one that is not known."""
        known = self._known.get((client, name))
        return None if known is None else known.prefix

    def expire(self, now: float) -> None:
        """Forget those that nobody used for the time to live."""
        while self._ttl and self._known and now - next(iter(self._known.values())).used > self._ttl:
            self._pop(next(iter(self._known)))

    def forget(self, names: Callable[[str | None], bool]) -> None:
        """Forget those of all namespaces that `names` is true for."""
        for key in [key for key in self._known if names(key[0])]:
            self._pop(key)

    def _pop(self, key: tuple[str | None, str]) -> None:
        gone = self._known.pop(key, None)
        if gone is not None:
            self._tokens -= gone.prefix.num_tokens
