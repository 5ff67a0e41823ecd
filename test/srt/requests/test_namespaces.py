"""Namespaces as they are made in the tokenizer process and completed in the scheduler."""

from __future__ import annotations

import pickle
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_hc.srt.binding import fields
from sglang_hc.srt.engine.guard import SglangTree
from sglang_hc.srt.requests.namespaces import (
    ClientKey,
    client_key,
    complete,
    keeps_state,
    pack_key,
    take_names,
)
from sglang_hc.tree.namespaces import Namespace, client_namespace


def adapter(seed: int) -> SimpleNamespace:
    weights = {"q": torch.randn(4, generator=torch.Generator().manual_seed(seed))}
    layers = [SimpleNamespace(weights=weights)]
    return SimpleNamespace(
        scaling=1.0, layers=layers, embedding_layers={}, added_tokens_embeddings={}
    )


def scheduler(**adapters: SimpleNamespace) -> Any:
    manager = SimpleNamespace(loras=adapters)
    runner, tree = SimpleNamespace(lora_manager=manager), object.__new__(SglangTree)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner), tree_cache=tree)


def completed(
    key: str | None, lora: str | None = None, self: Any = None, salt: str | None = None
) -> Namespace:
    """Of a request as SGLang makes it: an adapter's id is appended to the key."""
    joined = key if lora is None else (key or "") + lora
    req = SimpleNamespace(extra_key=joined, cache_salt=salt, lora_id=lora)
    server = self or scheduler()
    complete(server, req)
    named = fields.namespace_of(req)
    complete(server, req)  # it is queued again after a retraction
    key_of_tree = RadixKey(array("q", [1, 2]), req.extra_key, cache_salt=req.cache_salt)
    assert named == fields.namespace_of(req) == fields.namespace_of(key_of_tree[:1])
    assert fields.salt_of(req) is None
    return Namespace.of(named)


def test_a_request_without_parts_has_no_namespace() -> None:
    assert completed(None) == Namespace()


def test_what_the_tokenizer_packed_stays() -> None:
    assert completed(client_namespace("acme", "2")) == Namespace("acme", "2")


def test_what_no_hook_packed_is_a_key() -> None:
    assert completed("acme") == Namespace(key="acme")
    assert completed("\ud800").hashed is not None and completed("x" * 5000).hashed is not None


def test_a_salt_that_no_hook_packed_is_a_part_of_its_own() -> None:
    assert completed(None, salt="acme") == Namespace("acme")
    assert completed("2", salt="acme") == Namespace("acme", "2") != completed("acme2")
    assert completed("a", salt="b") != completed("ba") != completed("b", salt="a")
    assert completed("s1:b", salt="a") == Namespace("a", "s1:b"), "nobody packed it"
    one = completed("k", "one", scheduler(one=adapter(1)), salt="a")
    assert one.client == Namespace("a", "k") and one.adapter is not None


def test_an_adapter_is_its_content_under_any_name() -> None:
    server = scheduler(one=adapter(1), same=adapter(1), other=adapter(2))
    one, same, other = (completed("k1:a", name, server) for name in ("one", "same", "other"))
    assert one == same and one != other
    assert one.client == Namespace(key="a") and completed(None, "one", server).client == Namespace()


def test_an_adapter_that_is_not_loaded_is_like_no_other() -> None:
    assert completed(None, "gone") != completed(None, "gone")


def test_state_of_other_inputs_is_not_kept_even_when_they_are_gone() -> None:
    assert keeps_state(SimpleNamespace(input_embeds=None))
    req = SimpleNamespace(extra_key=None, lora_id=None, multimodal_inputs=object())
    complete(scheduler(), req)
    req.multimodal_inputs = None  # SGLang does so when the request is over
    assert not keeps_state(req)


def tokenizer() -> Any:
    return SimpleNamespace(server_args=SimpleNamespace(_hc_config={}))


def packed(**parts: Any) -> Namespace:
    """Of a request with these fields, on its way to the scheduler."""
    request = GenerateReqInput(input_ids=[1], **parts)
    request.normalize_batch_and_arguments()
    for _ in range(2):  # SGLang makes the next turn of a tool's from the fields of the last one
        pack_key(tokenizer(), request, None)
    assert type(request.extra_key) is (ClientKey if any(parts.values()) else type(None))
    assert request.cache_salt is None
    return Namespace.of(request.extra_key)


def test_salt_and_key_are_packed_once() -> None:
    assert packed() == packed(cache_salt="", extra_key="") == Namespace()
    assert packed(extra_key="s4:acme") == Namespace(key="s4:acme")
    assert packed(cache_salt="b", extra_key="a") == Namespace("b", "a") != packed(extra_key="ba")
    assert packed(cache_salt="k1:a") == Namespace("k1:a") != packed(extra_key="k1:a")
    for field in ("extra_key", "cache_salt"):
        with pytest.raises(ValueError, match=f"{field} must be a string, not list"):
            pack_key(tokenizer(), SimpleNamespace(**{field: []}), None)
    pack_key(tokenizer(), SimpleNamespace(), None)  # an embedding request has none


def test_each_prompt_of_a_batch_has_its_own_salt() -> None:
    batch = GenerateReqInput(input_ids=[[1], [2]], cache_salt=["a", ""], extra_key="k")
    batch.normalize_batch_and_arguments()
    for i in range(2):
        pack_key(tokenizer(), batch[i], None)
    assert [batch[i].extra_key for i in range(2)] == ["s1:ak1:k", "k1:k"]


def test_a_server_without_the_tiers_leaves_both_to_sglang() -> None:
    request = SimpleNamespace(extra_key="k", cache_salt="a")
    pack_key(SimpleNamespace(server_args=SimpleNamespace()), request, None)
    complete(SimpleNamespace(tree_cache=None), request)
    assert (request.extra_key, request.cache_salt) == ("k", "a")


def test_a_packed_key_leaves_the_process_as_a_plain_string() -> None:
    key = client_key("acme", None)
    assert type(key) is ClientKey
    sent = pickle.loads(pickle.dumps(key))
    assert type(sent) is str and sent == key


@pytest.mark.parametrize(
    ("sent", "body", "wanted"),
    [
        ({}, {"cache_salt": "acme", "extra_key": "2"}, ("acme", "2")),
        ({}, {"extra_key": "2"}, (None, "2")),
        ({"cache_salt": "acme"}, {"cache_salt": "acme"}, ("acme", None)),
        ({"extra_key": client_key("acme", None)}, {"cache_salt": "acme"}, (None, "s4:acme")),
        ({}, {"messages": []}, (None, None)),
        ({"cache_salt": "of an engine"}, None, ("of an engine", None)),
    ],
)
def test_a_salt_counts_on_routes_that_drop_it(
    sent: dict[str, Any], body: Any, wanted: tuple[str | None, str | None]
) -> None:
    obj = GenerateReqInput(text="x", **sent)
    take_names(obj, None if body is None else SimpleNamespace(_json=body))
    assert (obj.cache_salt, obj.extra_key) == wanted
