"""One guard at the edge: an error of ours costs a request its reuse, never the server.

Everything SGLang calls of us goes through here: the hooks (`plugin.all_hooks`) and the methods of
the tree (`method`). An `Exception` that our own code raised is logged and counted, what we keep of
the request is dropped, and SGLang gets the answer that it would have had without us. Each place
says what that is; `Unguarded` and `UNGUARDED` say why an error there may end the process. A test
holds that every method of the tree that SGLang calls is guarded or says why not.

What SGLang's own code raises passes through unchanged, and so do BaseExceptions. Several ranks must
decide alike, and one alone sees its own error: with them errors of the scheduler pass through too.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookType

from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine import in_place

logger = logging.getLogger(__name__)

counters: Counter[str] = Counter()
"""Of this process, which has one scheduler: `guarded_errors`, and what `entrance.py` refused."""

LOG_EVERY_S = 60.0
"""Of one place, a traceback is logged so often at most."""

_logged: dict[str, float] = {}


def nothing(*_: Any, **__: Any) -> None:
    pass


class Tokenizer(NamedTuple):
    """A hook of the tokenizer's process: an error is the request's; its client gets status 400."""


class Unguarded(NamedTuple):
    """An error of this hook passes through, and why it may."""

    why: str


class Guarded(NamedTuple):
    """An error of ours costs reuse. Around a function of SGLang's, its answer is given; a hook must
    ask it at most once. drop: told of (tree, arguments) to forget what we keep of the requests
    concerned. It may raise."""

    drop: Callable[..., object] = nothing


def give_up(tree: Any, self: Any, req: Any, *_: Any, **__: Any) -> None:
    """Nothing is fetched for a request any more."""
    tree.waiting.give_up(req)


def like_no_other(tree: Any, self: Any, req: Any, *_: Any, **__: Any) -> None:
    """A request whose namespace is not known shares nothing with anybody."""
    fields.set_namespace(req, secrets.token_hex(16))


STALE = Unguarded("state of other weights, or that was to be forgotten, would be served")

UNGUARDED: dict[str, str] = {
    "reset": STALE.why,
    "ready_to_load_host_cache": "nobody may read what is in slots that were promised",
    "check_hicache_events": "its parts are guarded, but for restorations that no pass picked up",
    "release_host_resources": "the server stops",
    "sanity_check": "it is there to raise",
    "evictable_size": "it adds three numbers",
    "full_evictable_size": "it adds three numbers",
    "swa_evictable_size": "it adds two numbers",
    "mamba_evictable_size": "it adds two numbers",
    "is_backuped": "it is a constant",
    "attach_storage_backend": "it is a constant",
    "detach_storage_backend": "it is a constant",
}
"""Other methods of the tree that SGLang calls, and why an error there may end the process."""


# -- the guard -----------------------------------------------------------------------------------


class _Asked:
    """SGLang's function, and how it went."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.__name__ = getattr(function, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self.result = self._function(*args, **kwargs)
        except BaseException as error:
            self.error = error
            raise
        self.done = True
        return self.result


def name_of(hook: Callable[..., Any]) -> str:
    """How a hook is called in the log: module and function."""
    return f"{hook.__module__.rpartition('.')[2]}.{hook.__name__}"


def guarded(
    hook: Callable[..., Any], kind: HookType, on_error: Guarded | Tokenizer | Unguarded
) -> Callable[..., Any]:
    """A hook whose errors do what `on_error` says."""
    if isinstance(on_error, Unguarded):
        return hook
    name = name_of(hook)
    if isinstance(on_error, Tokenizer):
        wrapped = _of_tokenizer(name, hook)
    elif kind is HookType.AROUND:
        wrapped = _around(name, hook, on_error.drop)
    else:
        wrapped = _beside(name, hook, on_error.drop)
    wrapped.__name__, wrapped.__module__ = hook.__name__, hook.__module__
    return wrapped


SglangMethod = Callable[..., Any]
"""A method of SGLang's own tree, without the tree."""


class SglangTree(UnifiedRadixCache):
    """SGLang's tree; methods of its classes are guarded by `method`."""

    decides_alone = True
    """Whether no other ranks must decide alike."""

    events: Any = None
    """What tells KV events (`srt.tree.events.Events`); None where nobody is told."""

    version: str | None = None
    """In namespaces, the weights that there are now (`srt.model.weight_versions`)."""

    images: Any = None
    """Which images came (`srt.requests.images.KnownImages`); None where none are kept."""


def method(
    drop: Callable[..., object] = nothing, answer: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Guards a method of the tree. drop: see `Guarded`. answer: of (tree, arguments), what is
    answered after an error. With None it is what SGLang's own tree answers, whose method `own` is
    given as its first argument, and asks at most once."""

    def decorate(own: Callable[..., Any]) -> Callable[..., Any]:
        name = own.__name__
        theirs = answer or getattr(UnifiedRadixCache, name)

        @wraps(own)
        def call(tree: SglangTree, *args: Any, **kwargs: Any) -> Any:
            in_place.ran(name)

            def run(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
                given = (asked,) if answer is None else ()
                return own(tree, *given, *args, **kwargs)

            asked = _Asked(partial(theirs, tree))
            return _served(name, drop, tree, run, asked, args, kwargs)

        return call

    return decorate


def answer_of(name: str, tree: Any, question: Callable[[], Any]) -> Any:
    """What a part of ours answers that SGLang's own code asks; None after an error of ours."""
    try:
        return question()
    except Exception as error:
        _note(name, tree, error)
        return None


def _around(name: str, hook: Callable[..., Any], drop: Callable[..., object]) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _served(name, drop, tree_of(*args), hook, _Asked(original), args, kwargs)

    return call


def _beside(name: str, hook: Callable[..., Any], drop: Callable[..., object]) -> Callable[..., Any]:
    """Before or after a function of SGLang's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def own(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
            return hook(*args, **kwargs)

        return _served(name, drop, tree_of(*args), own, _Asked(nothing), args, kwargs)

    return call


def _served(
    name: str, drop: Callable[..., object], tree: SglangTree | None, own: Callable[..., Any],
    asked: _Asked, args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """What `own` gives, which may ask SGLang; if it fails itself, what SGLang gives."""
    try:
        return own(asked, *args, **kwargs)
    except Exception as error:
        if asked.error is not None:
            raise
        _note(name, tree, error)
        if tree is not None:
            try:
                drop(tree, *args, **kwargs)
            except Exception:
                _log(f"{name}, while its request was forgotten")
        return asked.result if asked.done else asked(*args, **kwargs)


def _of_tokenizer(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except ValueError:
            raise
        except Exception as error:
            _log(name)
            raise ValueError("the request has a value that cannot be read") from error

    return call


def _note(name: str, tree: SglangTree | None, error: Exception) -> None:
    """Count and log an error of ours; raises it where one rank alone may not go on."""
    if tree is not None and not tree.decides_alone:
        raise error
    counters["guarded_errors"] += 1
    _log(name)


def _log(name: str) -> None:
    now = time.monotonic()
    if now - _logged.get(name, -LOG_EVERY_S) >= LOG_EVERY_S:
        _logged[name] = now
        logger.exception("sglang-hc: an error in %s; it costs the request its reuse", name)


def tree_of(*holders: Any) -> Any:
    """The tree (`HcRadixCache`) of the first of these that has one: of a scheduler, or a part of it
    or a batch; None where the tiers are off."""
    trees = (getattr(one, "tree_cache", None) for one in holders)
    return next((tree for tree in trees if isinstance(tree, SglangTree)), None)
