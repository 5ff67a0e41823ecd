"""Whose state a request's is: its namespace, made in the tokenizer and completed in the scheduler.

SGLang carries `cache_salt` and `extra_key` side by side and appends an adapter's id to the latter,
so that different parts may make one key, and an adapter's id stays the same when its weights
change. Here the client's parts are packed with their lengths where they enter (`tree.namespaces`),
and the scheduler adds a digest of the adapter's weights, and of the model's where they were
updated, before it looks for the request's prefix. From then on `extra_key` alone says whose state
it is, on the device and below. When the weights change, who waits gets another name, and what
others have computed is of no version (`leave_version`).
"""

from __future__ import annotations

import secrets
from typing import Any

from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments, fields
from sglang_hc.srt.engine.guard import tree_of
from sglang_hc.srt.model.identity import adapter_digest
from sglang_hc.srt.requests import images
from sglang_hc.tree.forgetting import FORGOTTEN
from sglang_hc.tree.namespaces import Namespace, client_namespace

_NAMED = "_hc_named"
"""Attribute of a request whose namespace is complete."""

_KEPT = "_hc_kept"
"""Attribute of a request: the answer of `keeps_state`."""

_DIGEST = "_hc_digest"
"""Attribute of a loaded adapter."""


class ClientKey(str):
    """A client's namespace that is packed already. It leaves the process as a plain string."""

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def client_key(salt: object, key: object) -> ClientKey | None:
    """The namespace of what a client sent. Raises ValueError, which becomes HTTP status 400."""
    packed = client_namespace(salt, key)
    return None if packed is None else ClientKey(packed)


def pack_key(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE TokenizerManager._validate_one_request, which every request passes. SGLang has made
    None of an empty salt or key."""
    salt, key = fields.salt_of(obj), fields.sent_namespace(obj)
    if isinstance(key, ClientKey) or (salt is None and key is None):
        return
    if config_of(arguments.of(self)) is not None:
        fields.set_namespace(obj, client_key(salt, key))


def complete(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE Scheduler._add_request_to_queue, where no prefix has been looked for yet.

    A salt shows that no hook has packed the two. A key that none has packed is the client's
    `extra_key`, whatever it says.
    """
    tree = tree_of(self)
    if tree is None or hasattr(req, _NAMED):
        return
    setattr(req, _NAMED, True)
    salt, key, lora = fields.salt_of(req), fields.namespace_of(req), fields.adapter_of(req)
    if lora is not None and key is not None:  # SGLang appended it
        key = key.removesuffix(lora) or None
    if salt is None:
        named = Namespace.of(key)
    else:
        named = (Namespace() if key is None else Namespace.of_key(key))._replace(salt=salt)
    adapter = None if lora is None else _digest_of(self.tp_worker.model_runner, lora)
    own = named._replace(adapter=adapter, weights=tree.version)
    fields.set_namespace(req, own.pack())
    if adapter is not None and tree.events is not None:
        self.kv_event_lora_names.register(req)  # what KV events call this namespace's adapter
    setattr(req, _KEPT, images.look_at(tree.images, req))


def leave_version(req: Any, weights: str | None) -> bool:
    """The weights are others now. A request that waits asks for their state; nothing is kept, on
    the device or below, of one that has computed something. Returns whether it would have been."""
    namespace = fields.namespace_of(req)
    if hasattr(req, _NAMED) and not (namespace or "").startswith(FORGOTTEN):
        fields.set_namespace(req, Namespace.of(namespace)._replace(weights=weights).pack())
    if fields.row_of(req) is None or fields.stays_out_of_tree(req):
        return False
    setattr(req, _KEPT, False)
    fields.keep_out_of_tree(req)
    return True


def keeps_state(req: Any) -> bool:
    """Whether a request's state depends on what its path says alone, so that it may be kept below
    the device. It was found out when the request was taken in (`images.look_at`)."""
    known: bool | None = getattr(req, _KEPT, None)
    if known is None:
        known = not fields.has_other_inputs(req)
        setattr(req, _KEPT, known)
    return known


def _digest_of(runner: Any, lora: str) -> str:
    """Digest of a loaded adapter's content, computed once. What is not loaded is like no other."""
    manager = getattr(runner, "lora_manager", None)  # a server without adapters has none
    adapter = None if manager is None else manager.loras.get(lora)
    if adapter is None:
        return secrets.token_hex(16)
    known: str | None = getattr(adapter, _DIGEST, None)
    if known is None:
        known = adapter_digest(adapter)
        setattr(adapter, _DIGEST, known)
    return known
