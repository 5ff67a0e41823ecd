"""Namespaces as they are made in the tokenizer process and completed in the scheduler."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_hc.srt.engine.guard import SglangTree
from sglang_hc.srt.requests.namespaces import ClientKey, client_key, complete, keeps_state, pack_key
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


def completed(key: str | None, lora: str | None = None, self: Any = None) -> Namespace:
    """Of a request as SGLang makes it: an adapter's id is appended to the key."""
    joined = key if lora is None else (key or "") + lora
    req = SimpleNamespace(extra_key=joined, lora_id=lora)
    server = self or scheduler()
    complete(server, req)
    named = req.extra_key
    complete(server, req)  # it is queued again after a retraction
    assert req.extra_key == named
    return Namespace.of(named)


def test_a_request_without_parts_has_no_namespace() -> None:
    assert completed(None) == Namespace()


def test_what_the_tokenizer_packed_stays() -> None:
    assert completed(client_namespace("acme", "2")) == Namespace("acme", "2")


def test_what_no_hook_packed_is_a_key() -> None:
    assert completed("acme") == Namespace(key="acme")
    assert completed("\ud800").hashed is not None and completed("x" * 5000).hashed is not None


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


def test_a_key_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimpleNamespace(extra_key="s4:acme")
    for _ in range(2):
        pack_key(tokenizer(), request, None)
        assert Namespace.of(request.extra_key) == Namespace(key="s4:acme")
    with pytest.raises(ValueError, match="extra_key must be a string, not list"):
        pack_key(tokenizer(), SimpleNamespace(extra_key=[]), None)
    pack_key(tokenizer(), SimpleNamespace(), None)  # an embedding request has none


def test_a_packed_key_leaves_the_process_as_a_plain_string() -> None:
    key = client_key("acme", None)
    assert type(key) is ClientKey
    sent = pickle.loads(pickle.dumps(key))
    assert type(sent) is str and sent == key
