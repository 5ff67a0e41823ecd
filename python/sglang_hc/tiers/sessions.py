"""What sessions left last, by the names that clients gave them: so that a session can be retained,
fetched, demoted or forgotten without its tokens.

Names belong to their namespace. As many tokens are known as the host tier holds, of MAX_SESSIONS
sessions. Beyond that the client that has most forgets those that it used longest ago: nobody can
push out the names of clients who have less. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_hc.policy.pins import MAX_SESSIONS
from sglang_hc.tree.identity import Prefix
from sglang_hc.tree.namespaces import Namespace


class _Known(NamedTuple):
    prefix: Prefix
    used: float


@dataclass(slots=True)
class _Client:
    """names: of its sessions, the oldest first."""

    names: dict[str, None] = field(default_factory=dict)
    tokens: int = 0


class Sessions:
    """Paths by name and client, as `namespaces.client_namespace` names it. A call costs O(1), and
    O(clients) when a bound is reached."""

    def __init__(self, max_tokens: int, ttl: float = 0.0, max_sessions: int = MAX_SESSIONS) -> None:
        """ttl: seconds after which a session that nobody used is forgotten; 0 for never."""
        self._max_tokens, self._max_sessions, self._ttl = max_tokens, max_sessions, ttl
        self._known: OrderedDict[tuple[str | None, str], _Known] = OrderedDict()
        self._clients: dict[str | None, _Client] = {}
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: str, prefix: Prefix, now: float) -> None:
        """A session has left this path, in place of what it left before."""
        client = Namespace.of(prefix.namespace).client.pack()
        self._pop((client, name))
        self._known[client, name] = _Known(prefix, now)
        own = self._clients.setdefault(client, _Client())
        own.names[name] = None
        own.tokens += prefix.num_tokens
        self._tokens += prefix.num_tokens
        while self._tokens > self._max_tokens:
            self._pop_oldest(max(self._clients, key=lambda one: self._clients[one].tokens))
        while len(self._known) > self._max_sessions:
            self._pop_oldest(max(self._clients, key=lambda one: len(self._clients[one].names)))

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

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts follow from the sessions and keep the bounds."""
        assert self._tokens == sum(one.prefix.num_tokens for one in self._known.values())
        assert self._tokens == sum(one.tokens for one in self._clients.values())
        names = [(client, name) for client, own in self._clients.items() for name in own.names]
        assert self._known.keys() == set(names) and len(names) == len(self._known)
        assert all(own.names for own in self._clients.values())
        assert self._tokens <= self._max_tokens and len(names) <= self._max_sessions

    def _pop_oldest(self, client: str | None) -> None:
        self._pop((client, next(iter(self._clients[client].names))))

    def _pop(self, key: tuple[str | None, str]) -> None:
        gone = self._known.pop(key, None)
        if gone is None:
            return
        client, name = key
        own = self._clients[client]
        del own.names[name]
        own.tokens -= gone.prefix.num_tokens
        self._tokens -= gone.prefix.num_tokens
        if not own.names:
            del self._clients[client]
