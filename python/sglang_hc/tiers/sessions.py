"""What sessions left last, by the names that clients gave them: so that a session can be retained,
fetched, demoted or forgotten without its tokens.

Names belong to their namespace. As many tokens are known as the host tier holds, of MAX_SESSIONS
sessions. Beyond that those that were used longest ago are forgotten, first those of clients that
have several and with them more than a SHARE of either: nobody pushes out the names of many by
giving many. Belongs to the scheduler thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sglang_hc.policy.pins import MAX_SESSIONS
from sglang_hc.tree.identity import Prefix
from sglang_hc.tree.namespaces import Namespace

SHARE = 4
"""Of what may be known a client has this part before its own names leave first."""


class _Known(NamedTuple):
    """number: the later one was used last, by whichever clock."""

    prefix: Prefix
    used: float
    number: int


@dataclass(slots=True)
class _Client:
    """names: of its sessions, the oldest first."""

    names: dict[str, None] = field(default_factory=dict)
    tokens: int = 0


class Sessions:
    """Paths by name and client, as `namespaces.client_namespace` names it. A note costs O(1), and
    as much for each that is forgotten, however many clients there are."""

    def __init__(self, max_tokens: int, ttl: float = 0.0, max_sessions: int = MAX_SESSIONS) -> None:
        """ttl: seconds after which a session that nobody used is forgotten; 0 for never."""
        self._max_tokens, self._max_sessions, self._ttl = max_tokens, max_sessions, ttl
        self._known: OrderedDict[tuple[str | None, str], _Known] = OrderedDict()
        self._clients: dict[str | None, _Client] = {}
        self._greedy: set[str | None] = set()
        """Clients with several sessions and more than their share: a few at most."""
        self._tokens = 0
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._known)

    def note(self, name: str, prefix: Prefix, now: float) -> None:
        """A session has left this path, in place of what it left before."""
        client = Namespace.of(prefix.namespace).client.pack()
        self._pop((client, name))
        self._known[client, name] = _Known(prefix, now, next(self._numbers))
        own = self._clients.setdefault(client, _Client())
        own.names[name] = None
        own.tokens += prefix.num_tokens
        self._tokens += prefix.num_tokens
        self._weigh(client)
        while self._tokens > self._max_tokens or len(self._known) > self._max_sessions:
            oldest = [(one, next(iter(self._clients[one].names))) for one in self._greedy]
            self._pop(min(oldest, key=self._number_of, default=next(iter(self._known))))

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
        assert self._greedy == {client for client in self._clients if self._is_greedy(client)}
        assert len(self._greedy) <= 2 * (SHARE - 1)
        assert self._tokens <= self._max_tokens and len(names) <= self._max_sessions

    def _number_of(self, key: tuple[str | None, str]) -> int:
        return self._known[key].number

    def _is_greedy(self, client: str | None) -> bool:
        own = self._clients.get(client)
        return (
            own is not None
            and len(own.names) > 1
            and (
                own.tokens * SHARE > self._max_tokens or len(own.names) * SHARE > self._max_sessions
            )
        )

    def _weigh(self, client: str | None) -> None:
        """A client has more than before, or less."""
        (self._greedy.add if self._is_greedy(client) else self._greedy.discard)(client)

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
        self._weigh(client)
