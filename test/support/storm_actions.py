"""What a storm consists of: engines, and what clients, operators and disks do to them.

A storm is plain data. Its `repr` is a program that repeats it, see `storms.script`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PLAIN_MODEL, ADAPTED_MODEL = "llama-mha", "llama-gqa"


@dataclass(frozen=True)
class Engine:
    """How an engine starts. host_gib, pool (tokens): sizes of its tiers. disk: it has one, the same
    directory as the engines before it. shares: a directory that servers share (`--hc-remote file`)
    is behind that, or in its place. page: rows of SGLang's pages, where the model lets us choose.
    meets: by its profile, histories are half computed and half read. weights, adapters: versions
    of its files, by an adapter's name. kind: name of a model of `storm_models`; empty for one whose
    layers all have full attention. told: somebody reads its KV events."""

    plan: str = "kv"
    pool: int = 640
    host_gib: float = 0.2
    disk: bool = False
    shares: bool = False
    page: int = 1
    meets: bool = False
    chunk: int = 512
    flags: tuple[str, ...] = ()
    weights: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    kind: str = ""
    told: bool = False

    @property
    def model(self) -> str:
        return self.kind or (ADAPTED_MODEL if self.adapters else PLAIN_MODEL)


@dataclass(frozen=True)
class Send:
    """A request. Its id is the client's, whatever else is alive under it.

    talk, turn, edit: which prompt. voice: whose replies are in its history, "base" (the first
    weights, no adapter) or "own". new: tokens asked for. top: log probabilities too.
    """

    client: str
    talk: int
    turn: int = 0
    edit: int = 0
    voice: str = "base"
    new: int = 16
    salt: str | None = None
    adapter: str | None = None
    priority: int | None = None
    top: bool = True


@dataclass(frozen=True)
class Abort:
    """The client leaves: what is alive under its id is aborted."""

    client: str


@dataclass(frozen=True)
class Run:
    """So many passes of the scheduler."""

    steps: int


@dataclass(frozen=True)
class Drain:
    """Until every request has its answer. settle: and all is saved, and every invariant holds."""

    settle: bool = False


@dataclass(frozen=True)
class Evict:
    """Everything idle leaves the device."""


@dataclass(frozen=True)
class Flush:
    """Drain, then flush every tier but the disk."""


@dataclass(frozen=True)
class Forget:
    """Clients with this salt, or without one, are forgotten in every tier, whatever runs."""

    salt: str | None


@dataclass(frozen=True)
class Weights:
    """Drain, then new weights from their files. abort: instead of waiting for requests."""

    version: int
    abort: bool = False


@dataclass(frozen=True)
class Replace:
    """Drain, unload an adapter, write other files to its path, load it again."""

    adapter: str
    version: int


@dataclass(frozen=True)
class Retract:
    """From now on SGLang retracts requests every so many passes; 0 for no more."""

    every: int


@dataclass(frozen=True)
class Pause:
    """All running requests are retracted, as for an update of weights, and go on after some
    passes."""

    steps: int


@dataclass(frozen=True)
class Disk:
    """What becomes of reads and writes from now on.

    fault: None, "read error", "short read", "write error", "full", "removed" (the directory, for
    good). delay: an operation takes up to so many polls. refuses: no write is accepted.
    """

    fault: str | None = None
    delay: int = 0
    refuses: bool = False


@dataclass(frozen=True)
class Scatters:
    """What becomes of copies in host memory from now on. fails: one in so many, 0 for none."""

    delay: int = 0
    fails: int = 0


@dataclass(frozen=True)
class Clock:
    """Clocks jump. monotonic: seconds forward. wall: seconds, in any direction."""

    monotonic: float = 0.0
    wall: float = 0.0


@dataclass(frozen=True)
class Restart:
    """The engine ends and another one starts. clean: it drains and closes its tiers first."""

    engine: Engine
    clean: bool = True


Action = (
    Send | Abort | Run | Drain | Evict | Flush | Forget | Weights | Replace | Retract | Pause | Disk
    | Scatters | Clock | Restart
)  # fmt: skip


@dataclass(frozen=True)
class Storm:
    """seed: of what is not an action: how long each operation takes."""

    engine: Engine
    actions: tuple[Action, ...]
    seed: int = 0


class Ask(NamedTuple):
    """A prompt and who is to answer it. adapter: name and version, "" for none."""

    model: str
    weights: int
    adapter: str
    talk: int
    turn: int
    edit: int
    voice: str

    def before(self) -> Ask | None:
        """The turn whose reply the history ends with."""
        if not self.turn:
            return None
        model, weights, adapter = self.model, self.weights, self.adapter
        if self.voice == "base":
            weights, adapter = 0, ""
        return Ask(model, weights, adapter, self.talk, self.turn - 1, 0, self.voice)


class Phase(NamedTuple):
    """What happens to one engine. asks: of its `Send`s, in their order."""

    engine: Engine
    actions: list[Action]
    asks: list[Ask]
    clean: bool


def phases(storm: Storm) -> Iterator[Phase]:
    """A storm cut at its restarts, with what each request asks."""
    engine, actions = storm.engine, [*storm.actions, Restart(storm.engine)]
    begun: list[Action] = []
    for action in actions:
        if isinstance(action, Restart):
            yield Phase(engine, begun, list(_asks(engine, begun)), action.clean)
            engine, begun = action.engine, []
        else:
            begun.append(action)


def _asks(engine: Engine, actions: Sequence[Action]) -> Iterator[Ask]:
    weights, adapters = engine.weights, dict(engine.adapters)
    for action in actions:
        if isinstance(action, Weights):
            weights = action.version
        elif isinstance(action, Replace):
            adapters[action.adapter] = action.version
        elif isinstance(action, Send):
            name = action.adapter
            adapter = "" if name is None else f"{name}{adapters[name]}"
            yield Ask(
                engine.model, weights, adapter, action.talk, action.turn, action.edit, action.voice
            )
