"""Storms from seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from support.storm_actions import (
    Abort,
    Action,
    Clock,
    Disk,
    Drain,
    Engine,
    Evict,
    Flush,
    Forget,
    Pause,
    Replace,
    Restart,
    Retract,
    Run,
    Scatters,
    Send,
    Storm,
    Weights,
)
from support.storm_models import SPARSE
from support.storm_oracle import ADAPTERS, LONGEST_REPLY, TURNS, VERSIONS

PLANS = ("hidden", "hidden", "hidden:2,kv:2", "recompute:1,hidden:1,kv:2", "kv")
TALKS = 8
SALTS = (None, None, None, "", "x")
FAULTS = ("read error", "short read", "write error", "full", "read-only", "removed")
ASKED_AGAIN = 5
"""Prompts, when the storm is over."""
AUDITS = ("--hc-audit", "1")
PAGES = (1, 64)
TOLD = 4
"""Of one storm in so many somebody reads the KV events."""
HOST_BLOCKS = (1000, 32, 16)
"""In the host memory of the smaller models; a storm has about 50."""
BLOCK_KIB = {"deepseek-v3.2": 110, "kimi-linear": 60}
"""What a block takes of it, with a share of an end."""
_FLAGS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("--enable-priority-scheduling",),
    ("--disable-overlap-schedule",),
    ("--max-running-requests", "2"),
    ("--schedule-policy", "lpm"),
    ("--enable-mixed-chunk",),
    ("--hc-ttl", "30"),
    ("--hc-schedule", "ready-first"),
)


def pages_of(kind: str) -> tuple[int, ...]:
    """Pages that storms of a kind have: SGLang leaves no choice where an index is in pages."""
    return PAGES[1:] if kind in SPARSE.names else PAGES


def storm_of(seed: int, kind: str = "") -> Storm:
    """The same for the same seed, on every machine. kind: see `Engine`."""
    return _Author(seed, kind).storm()


class _Author:
    """Writes one storm, scene by scene."""

    def __init__(self, seed: int, kind: str) -> None:
        self._seed = seed
        self._rng = rng = random.Random(f"storm {seed}{kind}")
        self._layout = layout = random.Random(f"layout {seed}{kind}")
        adapters = {name: 0 for name in ADAPTERS} if rng.random() < 0.3 else {}
        self._engine = Engine(
            plan="kv" if adapters else rng.choice(PLANS),
            pool=rng.choice((640, 640, 1000, 2000)),
            host_gib=rng.choice((0.2, 0.2, 0.02, 0.005)),
            disk=rng.random() < (0.9 if adapters else 0.6),
            meets=rng.random() < 0.3,
            chunk=rng.choice((64, 128, 512)),
            flags=rng.choice(_FLAGS) + (AUDITS if layout.random() < 0.5 else ()),
            adapters=adapters,
        )
        if kind:
            host = layout.choice(HOST_BLOCKS) * BLOCK_KIB.get(kind, 160) / 2**20
            self._engine = replace(
                self._engine, kind=kind, plan="kv", adapters={}, meets=False, host_gib=host
            )
        shares = layout.random() < (0.3 if self._engine.disk else 0.8)
        self._pages = pages_of(kind)
        self._engine = replace(
            self._engine, shares=shares, page=layout.choice(self._pages), told=seed % TOLD == 2
        )
        self._first = self._engine
        self._actions: list[Action] = []
        self._sent: list[Send] = []
        self._shared: list[Send] = []
        """Requests whose id was sent again while they were alive."""
        self._talks = rng.sample(range(TALKS), 4)
        self._clients = 0

    def storm(self) -> Storm:
        rng = self._rng
        scenes: list[tuple[Callable[[], None], int]] = [
            (self._chatter, 4),
            (self._disconnect, 8),
            (self._twins, 2),
            (self._again, 4),
            (self._weather, 3),
            (self._preempt, 4),
            (self._forget, 2),
            (self._weights, 1),
            (self._replace, 3 if self._engine.adapters else 0),
            (self._restart, 3 if self._outlives else 0),
        ]
        choices, shares = zip(*scenes, strict=True)
        chosen = rng.choices(choices, shares, k=rng.randrange(5, 10))
        if self._outlives and self._restart not in chosen:
            chosen.insert(rng.randrange(1, len(chosen) + 1), self._restart)
        for scene in chosen:
            scene()
        self._ask_again()
        return Storm(self._first, tuple(self._actions), self._seed)

    @property
    def _outlives(self) -> bool:
        """Whether anything is left when an engine has ended."""
        return self._engine.disk or self._engine.shares

    # -- scenes ----------------------------------------------------------------------------------

    def _chatter(self) -> None:
        """Several clients at once."""
        for _ in range(self._rng.randrange(1, 5)):
            self._send(self._new_client())
            self._pass()

    def _disconnect(self) -> None:
        """A client stops its request, mostly to send another one under the same id."""
        rng, first = self._rng, self._send(self._new_client(), new=LONGEST_REPLY)
        self._actions.append(Run(rng.randrange(1, 12)))
        late = rng.random() < 0.15
        if not late:
            self._actions.append(Abort(first.client))
        if rng.random() < 0.15:
            self._pass()
        if rng.random() < 0.85:
            edit = 0 if rng.random() < 0.2 else rng.randrange(1, 3)
            self._shared.append(first)
            self._send(first.client, like=first, edit=edit, new=rng.randrange(1, LONGEST_REPLY))
        if late:
            self._actions.append(Abort(first.client))
        self._pass()

    def _twins(self) -> None:
        """Two requests under one id, as several tokenizer processes let in."""
        first = self._send(self._new_client(), new=LONGEST_REPLY)
        self._shared.append(first)
        self._pass()
        if self._rng.random() < 0.5:
            self._send(first.client, like=first, edit=self._rng.randrange(3))
        else:
            self._send(first.client)
        self._pass()

    def _again(self) -> None:
        """What was said before leaves the device, and somebody goes on with it."""
        rng = self._rng
        self._actions += [Drain(settle=rng.random() < 0.5), Evict()]
        for _ in range(rng.randrange(1, 4)):
            if not self._sent:
                break
            old = rng.choice(self._sent)
            turn = min(TURNS - 1, old.turn + rng.randrange(2))
            self._send(self._new_client(), like=old, turn=turn, edit=0)
            if rng.random() < 0.4:
                self._pass()

    def _weather(self) -> None:
        rng = self._rng
        kinds = ("scatters", "clock", *(("disk", "slow") if self._engine.disk else ()))
        kind = rng.choice(kinds)
        if kind == "disk":
            fault = rng.choice((None, *FAULTS))
            self._actions.append(Disk(fault, rng.choice((0, 3)), rng.random() < 0.1))
        elif kind == "slow":
            self._actions.append(Disk(None, rng.choice((3, 20, 100))))
        elif kind == "scatters":
            self._actions.append(Scatters(rng.choice((0, 3, 15)), rng.choice((0, 0, 10))))
        else:
            jump, step = rng.choice((0.0, 1.0, 60.0, 4000.0)), rng.choice((0.0, -9e4, 9e4))
            self._actions.append(Clock(jump, step))

    def _preempt(self) -> None:
        if self._rng.random() < 0.5:
            self._actions.append(Retract(self._rng.choice((0, 3, 7))))
        else:
            self._chatter()
            self._actions.append(Pause(self._rng.randrange(1, 4)))

    def _forget(self) -> None:
        rng = self._rng
        choices = Flush(), Forget(rng.choice(SALTS[2:])), Evict(), Evict()
        self._actions.append(rng.choice(choices))

    def _weights(self) -> None:
        self._actions.append(Weights(self._rng.randrange(VERSIONS), self._rng.random() < 0.5))

    def _replace(self) -> None:
        self._actions.append(Replace(self._rng.choice(ADAPTERS), self._rng.randrange(VERSIONS)))

    def _restart(self) -> None:
        """With something changed."""
        rng, old = self._rng, self._engine
        changed: dict[str, object] = {
            "weights": rng.choice((0, 0, 0, 1)),
            "page": self._layout.choice(self._pages),
        }
        if old.adapters:
            changed["adapters"] = {name: rng.randrange(VERSIONS) for name in old.adapters}
        elif rng.random() < 0.3 and not old.kind:
            changed["plan"] = rng.choice(PLANS)
        if rng.random() < 0.7:
            self._actions.append(Drain(settle=True))
        self._engine = replace(old, **changed)
        self._actions.append(Restart(self._engine, clean=rng.random() < 0.7))
        self._again()

    def _ask_again(self) -> None:
        """Much of what was said is asked for again, from what the tiers have of it."""
        self._actions += [Retract(0), Disk(), Scatters(), Drain(settle=True), Evict()]
        rng = self._rng
        asked = rng.sample(self._shared, min(3, len(self._shared)))
        asked = [replace(old, turn=min(TURNS - 1, old.turn + 1), edit=0) for old in asked]
        asked += rng.sample(self._sent, min(ASKED_AGAIN - len(asked), len(self._sent)))
        for old in asked:
            self._actions += [replace(old, client=self._new_client(), new=8), Drain()]

    # -- parts of scenes -------------------------------------------------------------------------

    def _new_client(self) -> str:
        self._clients += 1
        return f"c{self._clients}"

    def _pass(self) -> None:
        self._actions.append(Run(self._rng.randrange(1, 8)))

    def _send(self, client: str, like: Send | None = None, **fields: object) -> Send:
        """A request: a new one, or one that differs from another in some fields."""
        rng = self._rng
        if like is None:
            send = Send(
                client,
                talk=rng.choice(self._talks),
                turn=rng.randrange(TURNS),
                voice=rng.choice(("base", "own")),
                new=rng.randrange(1, LONGEST_REPLY + 1),
                salt=rng.choice(SALTS),
                adapter=rng.choice((None, *self._engine.adapters)),
                top=rng.random() < 0.7,
            )
        else:
            send = replace(like, client=client)
        if "--enable-priority-scheduling" in self._engine.flags:
            send = replace(send, priority=rng.randrange(3))
        send = replace(send, **fields)
        self._actions.append(send)
        self._sent.append(send)
        return send
