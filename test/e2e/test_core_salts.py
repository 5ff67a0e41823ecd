"""What one tenant leaves behind is served to no other by SGLang's real scheduler: from the device,
from host memory or from disk, whoever packed salt and key."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hc.srt.requests import pins
from sglang_hc.srt.requests.namespaces import pack_key
from sglang_hc.tree.identity import Prefix, pack_tokens
from sglang_hc.tree.namespaces import client_namespace
from support.core import Core, Reply, run_in_child
from support.forgetting import forgotten
from support.prompts import SMALL, on_disk, prompt

FLAGS = ("--hc-forms", "kv", *SMALL, "--max-total-tokens", "4096", "--hc-host-size-gb", "0.05")
PROMPT = prompt(11, 200)

Tenant = tuple[str | None, str | None]
"""Its salt and its key."""

OWNER: Tenant = ("a", "k")
STRANGERS: tuple[Tenant, ...] = (
    ("b", "k"), ("a", "l"), ("k", "a"), ("ak", None), ("ka", None), (None, "ak"), (None, "ka"),
    (None, "k"), ("a", None), (None, None),
)  # fmt: skip
"""Of the same tokens. Joined, or without the salt, their names would be the owner's."""


class Scene(NamedTuple):
    """Replies where the owner's state is in one tier alone: its own, and of the strangers."""

    owner: Reply
    strangers: list[Reply]


def ask(core: Core, tenant: Tenant, packed: bool) -> Reply:
    """packed: by the tokenizer, as every server with the tiers does it."""
    rid, (salt, key) = core.submit(PROMPT, 8), tenant
    if packed:
        request = GenerateReqInput(input_ids=PROMPT, cache_salt=salt, extra_key=key)
        pack_key(SimpleNamespace(server_args=core.args), request, PROMPT)
        salt, key = request.cache_salt, request.extra_key and str(request.extra_key)
    core.inbox[-1].cache_salt, core.inbox[-1].extra_key = salt, key
    core.run()
    return core.reply(rid)


def in_turn(directory: str, packed: bool) -> tuple[Reply, list[Scene], Reply, Reply]:
    core = Core(*FLAGS, *on_disk(directory))
    first = ask(core, OWNER, packed)
    scenes = []
    for leave in (core.settle, core.evict, core.forget):
        core.settle()
        leave()
        strangers = [ask(core, one, packed) for one in STRANGERS]
        scenes.append(Scene(ask(core, OWNER, packed), strangers))
        for one in STRANGERS:  # so that each is a stranger to the next tier
            core.settle()
            assert forgotten(core, client=client_namespace(*one))["complete"]
    core.settle()
    ask(core, STRANGERS[0], packed)
    core.settle()
    assert forgotten(core, client=client_namespace(*OWNER))["complete"]
    return first, scenes, ask(core, OWNER, packed), ask(core, STRANGERS[0], packed)


@pytest.mark.parametrize("packed", [True, False])
def test_equal_tokens_of_others_are_found_in_no_tier(
    models: None, tmp_path: Path, packed: bool
) -> None:
    first, scenes, again, other = run_in_child(in_turn, str(tmp_path), packed)
    assert first.cached == 0
    for scene in scenes:
        for stranger, reply in zip(STRANGERS, scene.strangers, strict=True):
            assert reply.cached == 0, stranger
            assert reply.tokens == first.tokens
        assert scene.owner.tokens == first.tokens
    device, host, disk = [scene.owner for scene in scenes]
    assert device.device > 190
    assert host.device == 0 and host.host > 190
    assert disk.device == disk.host == 0 and disk.storage == 192
    assert again.cached == 0, "the owner was forgotten"
    assert other.cached > 190, "and nobody else"


def pinned() -> list[int]:
    """Blocks that are pinned in the names of the owner, and of the others."""
    core = Core(*FLAGS)
    for tenant in (OWNER, *STRANGERS):
        ask(core, tenant, packed=False)
    core.settle()
    retention = core.tree.tiers.retention
    retention.pin(Prefix(client_namespace(*OWNER), pack_tokens(PROMPT)), "s", 60)

    def blocks(tenant: Tenant) -> int:
        body = {"namespace": client_namespace(*tenant)}
        found: int = pins.answer(retention, "hc_pins/list", body)["blocks"]
        return found

    return [blocks(tenant) for tenant in (OWNER, *STRANGERS)]


def test_a_pin_is_its_owners(models: None) -> None:
    owners, *others = run_in_child(pinned)
    assert owners >= 3 and not any(others)
