"""One guard at the edge: an error of ours costs a request its reuse, never the server.

Everything SGLang calls of us goes through here: the hooks (`plugin.all_hooks`) and the methods of
the tree (`protect`). An `Exception` that our own code raised is logged and counted, what we keep of
the request is dropped, and SGLang gets the answer that it would have had without us. The list of
hooks and `METHODS` say for each what that is; `Unguarded` and `UNGUARDED` say why an error there
may end the process. A test holds that every method of the tree that SGLang calls is in one of them.

What SGLang's own code raises passes through unchanged, and so do BaseExceptions. Several ranks must
decide alike, and one alone sees its own error: with them errors of the scheduler pass through too.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins.hook_registry import HookType

from sglang_hc.restore.arrival import LateLayer

logger = logging.getLogger(__name__)

counters: Counter[str] = Counter()
"""Of this process, which has one scheduler: `guarded_errors`, and what `entrance.py` refused."""

LOG_EVERY_S = 60.0
"""Of one place, a traceback is logged so often at most."""

_logged: dict[str, float] = {}

Instead = Callable[..., Any]


class Tokenizer(NamedTuple):
    """A hook of the tokenizer's process: an error is the request's; its client gets status 400."""


class Unguarded(NamedTuple):
    """An error of this hook passes through, and why it may."""

    why: str


class Guarded(NamedTuple):
    """What is done about an error of ours. Around a function of SGLang's, its answer is given; it
    is asked at most once.

    drop: told of (tree, arguments) to forget what we keep of the requests concerned. It may raise.
    answer: of (tree, arguments), in place of a method of the tree that SGLang's own tree has not.
    """

    drop: Instead = lambda tree, *args, **kwargs: None
    answer: Instead | None = None


# -- what is dropped -----------------------------------------------------------------------------


def _forget(tree: Any, req: Any) -> None:
    """Nothing more is saved of a request, and nothing fetched for it."""
    tree.drop(req)
    tree.waiting.give_up(req)


def give_up(tree: Any, self: Any, req: Any, *_: Any, **__: Any) -> None:
    tree.waiting.give_up(req)


def _give_up_all(tree: Any, rid: str, *_: Any) -> None:
    tree.waiting.give_up_all(rid)


def _forget_finished(tree: Any, req: Any, *_: Any, **__: Any) -> None:
    tree.drop(req)
    tree.waiting.finished(req, 0)


def _nothing_restored(tree: Any, params: Any) -> Any:
    """Of a host hit nothing is restored."""
    params.req.host_hit_length = 0
    return tree._empty_match_result.device_indices, params.req.last_node


def _end_pass(tree: Any, batch: Any, requests: list[Any]) -> None:
    """The pass was submitted; its restorations are over whatever became of its rows."""
    for req in requests:
        tree.drop(req)
    tree.tiers.abandon_pass()


def _forget_queue(tree: Any) -> None:
    """Whoever waits is admitted with what is there."""
    for req in tree.scheduler.waiting_queue:
        tree.waiting.give_up(req)


def like_no_other(tree: Any, self: Any, req: Any, *_: Any, **__: Any) -> None:
    """A request whose namespace is not known shares nothing with anybody."""
    req.extra_key = secrets.token_hex(16)


STALE = Unguarded("state of other weights, or that was to be forgotten, would be served")

# -- methods ---------------------------------------------------------------------------------------

METHODS: dict[str, Guarded] = {
    "match_prefix": Guarded(),
    "init_load_back": Guarded(answer=_nothing_restored),
    "evict": Guarded(),
    "prefetch_from_storage": Guarded(_give_up_all, lambda tree, *_: None),
    "check_prefetch_progress": Guarded(_give_up_all, lambda tree, *_: True),
    "pop_prefetch_loaded_tokens": Guarded(answer=lambda tree, *_: 0),
    "release_aborted_request": Guarded(answer=lambda tree, *_: None),
    "cache_unfinished_req": Guarded(lambda tree, req, *_, **__: _forget(tree, req)),
    "cache_finished_req": Guarded(_forget_finished),
    "take_in": Guarded(answer=lambda tree: None),
    "look_at_queue": Guarded(_forget_queue, lambda tree: None),
    "before_forward": Guarded(answer=lambda tree, *_: None),
    "after_forward": Guarded(_end_pass, lambda tree, *_: None),
    "clear_storage_backend": Guarded(answer=lambda tree, *_: False),
}
"""Methods of the tree. Where SGLang's own tree has the method, its answer is given."""

_MEMORY = "device slots were promised, and nobody may read what is in them"

UNGUARDED: dict[str, str] = {
    "reset": STALE.why,
    "ready_to_load_host_cache": _MEMORY,
    "check_hicache_events": "its parts are guarded, but for restorations that no pass picked up",
    "release_host_resources": "the server stops",
    "sanity_check": "it is there to raise",
    "evictable_size": "it adds two numbers",
    "is_backuped": "it is a constant",
}
"""Other methods of the tree that SGLang calls, and why an error there may end the process."""


# -- the guard -----------------------------------------------------------------------------------


class _Asked:
    """SGLang's function, asked at most once, whoever asks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun = self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.__name__ = getattr(function, "__name__", "")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun = True
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
        wrapped = _around(name, hook, on_error)
    else:
        wrapped = _beside(name, hook, on_error)
    wrapped.__name__, wrapped.__module__ = hook.__name__, hook.__module__
    return wrapped


def protect(tree: SglangTree) -> None:
    """Put the guard around what SGLang calls of a tree. Once per tree."""
    tree.asked = {}
    for name, on_error in METHODS.items():
        setattr(tree, name, _method(tree, name, on_error))


class SglangTree(RadixCache):
    """SGLang's tree; asked for an answer by `protect`'s guard, it gives it once."""

    asked: dict[str, _Asked] = {}  # noqa: RUF012  replaced in `protect`'s trees only
    decides_alone = True
    """Whether no other ranks must decide alike."""

    def match_prefix(self, params: Any) -> Any:
        return self._once("match_prefix", super().match_prefix, params)

    def evict(self, params: Any) -> Any:
        return self._once("evict", super().evict, params)

    def cache_unfinished_req(self, *args: Any, **kwargs: Any) -> Any:
        return self._once("cache_unfinished_req", super().cache_unfinished_req, *args, **kwargs)

    def cache_finished_req(self, *args: Any, **kwargs: Any) -> Any:
        return self._once("cache_finished_req", super().cache_finished_req, *args, **kwargs)

    def _once(self, name: str, theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        asked = self.asked.get(name)
        if asked is None or asked.begun:
            return theirs(*args, **kwargs)
        return asked(*args, **kwargs)


def _method(tree: SglangTree, name: str, on_error: Guarded) -> Callable[..., Any]:
    own = getattr(tree, name)
    theirs = partial(on_error.answer or getattr(RadixCache, name), tree)

    def called(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
        before = tree.asked.get(name)
        tree.asked[name] = asked
        try:
            return own(*args, **kwargs)
        finally:
            if before is None:
                del tree.asked[name]
            else:
                tree.asked[name] = before

    def call(*args: Any, **kwargs: Any) -> Any:
        return _served(name, on_error, tree, called, _Asked(theirs), args, kwargs)

    return call


def _around(name: str, hook: Callable[..., Any], on_error: Guarded) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _served(name, on_error, tree_of(*args), hook, _Asked(original), args, kwargs)

    return call


def _beside(name: str, hook: Callable[..., Any], on_error: Guarded) -> Callable[..., Any]:
    """Before or after a function of SGLang's."""

    def call(*args: Any, **kwargs: Any) -> Any:
        def own(asked: _Asked, *args: Any, **kwargs: Any) -> Any:
            return hook(*args, **kwargs)

        return _served(name, on_error, tree_of(*args), own, _Asked(_nothing), args, kwargs)

    return call


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _served(
    name: str, on_error: Guarded, tree: SglangTree | None, own: Callable[..., Any], asked: _Asked,
    args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """What `own` gives, which may ask SGLang; if it fails itself, what SGLang gives."""
    try:
        return own(asked, *args, **kwargs)
    except Exception as error:
        if asked.error is not None:
            raise
        _note(name, tree, error)
        if tree is not None:
            _drop(name, on_error, tree, args, kwargs)
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
    if isinstance(error, LateLayer) or (tree is not None and not tree.decides_alone):
        raise error
    counters["guarded_errors"] += 1
    _log(name)


def _log(name: str) -> None:
    now = time.monotonic()
    if now - _logged.get(name, -LOG_EVERY_S) >= LOG_EVERY_S:
        _logged[name] = now
        logger.exception("sglang-hc: an error in %s; it costs the request its reuse", name)


def _drop(name: str, on_error: Guarded, tree: SglangTree, args: Any, kwargs: Any) -> None:
    """What we keep of the requests concerned is forgotten, as far as that is possible."""
    try:
        on_error.drop(tree, *args, **kwargs)
    except Exception:
        _log(f"{name}, while its request was forgotten")


def tree_of(*holders: Any) -> Any:
    """The tree (`HcRadixCache`) of the first of these that has one: of a scheduler, or a part of it
    or a batch; None where the tiers are off."""
    trees = (getattr(one, "tree_cache", None) for one in holders)
    return next((tree for tree in trees if isinstance(tree, SglangTree)), None)
