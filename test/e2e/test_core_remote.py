"""A remote store under SGLang's real scheduler: two servers, and what they share."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_hc.store.disk.format import Block, BlockHeader, StoredModel, seal_block
from support.core import MODELS, Once, run_in_child
from support.prompts import in_directory, in_store, on_disk
from support.two_servers import (
    PROMPT,
    STORED,
    both_turns,
    first_turn,
    history,
    second_turn,
    server,
)

BLOCKS = "sglang-hc/*-*/?/?/*"
"""Their files in a directory."""


@pytest.mark.parametrize("form", ["hidden", "kv"])
@pytest.mark.parametrize(("flags", "name"), [(in_directory, "file"), (in_store, "Files")])
def test_one_server_goes_on_with_what_another_computed(
    once: Once, tmp_path: Path, form: str, flags: Callable[[object], tuple[str, ...]], name: str
) -> None:
    first, wanted = once(both_turns)
    tokens, stats = run_in_child(first_turn, form, *flags(tmp_path))
    assert tokens == first
    assert stats["remote_saved_blocks"] == 4
    reply, stats = run_in_child(second_turn, form, first, *flags(tmp_path))
    assert reply.storage == STORED == stats["restored_tokens"]
    assert stats["remote_loaded_blocks"] == 4
    assert reply.tokens == wanted
    assert stats["backend"] == name


def second_turn_uninterrupted(directory: str, first: list[int]) -> int:
    """Tokens that come from the store when no thread is made to let go of the interpreter."""
    core = server("kv", *in_store(directory))
    sys.setswitchinterval(1e6)
    return core.ask(history(first), 1).storage


def test_passes_without_a_batch_let_the_store_be_read(models: None, tmp_path: Path) -> None:
    first, _ = run_in_child(first_turn, "kv", *in_store(tmp_path))
    assert run_in_child(second_turn_uninterrupted, str(tmp_path), first) == STORED


def test_only_the_same_model_plan_dtype_and_namespace_find_it(models: None, tmp_path: Path) -> None:
    """Wherever a host has its checkpoint. Two may have different ones in the same place."""
    store, model = in_directory(tmp_path), tmp_path / "elsewhere"
    first, stats = run_in_child(first_turn, "kv", *store)
    assert stats["remote_saved_blocks"] == 4
    shutil.copytree(MODELS / "llama-mha", model)
    reply, stats = run_in_child(partial(second_turn, "kv", first, *store, model=str(model)))
    assert reply.storage == STORED
    assert stats["remote_loaded_blocks"] == 4
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    for form, other in (
        ("hidden", {}),
        ("kv", {"dtype": "bfloat16"}),
        ("kv", {"salt": "other"}),
        ("kv", {"model": str(model)}),
    ):
        reply, stats = run_in_child(partial(second_turn, form, first, *store, **other))
        assert reply.cached == 0
        assert "remote_loaded_blocks" not in stats


def first_block(*below: str) -> None:
    core = server("hidden", *below)
    core.ask(PROMPT[:70], 24)
    core.settle()


def test_a_disk_and_a_remote_store_together(once: Once, tmp_path: Path) -> None:
    """The first block comes from the disk, the rest from the store."""
    first, wanted = once(both_turns)
    store, disk, other = (
        in_directory(tmp_path / "s"),
        on_disk(tmp_path / "d"),
        on_disk(tmp_path / "e"),
    )
    _, stats = run_in_child(first_turn, "hidden", *store, *disk)
    assert stats["remote_saved_blocks"] == 4 == stats["disk_saved_blocks"]
    run_in_child(first_block, *other)
    reply, stats = run_in_child(second_turn, "hidden", first, *store, *other)
    assert (stats["disk_loaded_blocks"], stats["remote_loaded_blocks"]) == (1, 3)
    assert reply.storage == STORED
    assert reply.tokens == wanted
    assert stats["backend"] == "disk+file"


def with_key(key: Path, secret: bytes) -> tuple[str, ...]:
    key.write_bytes(secret)
    key.chmod(0o600)
    return "--hc-remote-key", str(key)


def test_only_servers_with_the_same_key_share_a_directory(once: Once, tmp_path: Path) -> None:
    """Others find nothing there, and make no error of it; a block that is put there without the
    key is forged."""
    first, wanted = once(both_turns)
    shared, own = in_directory(tmp_path / "s"), with_key(tmp_path / "key", b"a" * 16)
    _, stats = run_in_child(first_turn, "kv", *shared, *own)
    assert stats["remote_saved_blocks"] == 4
    for flags in ((), with_key(tmp_path / "other", b"b" * 16)):
        reply, stats = run_in_child(second_turn, "kv", first, *shared, *flags)
        assert reply.tokens == wanted and reply.cached == 0
        assert not any(name.startswith("remote_read") for name in stats)
    reply, stats = run_in_child(second_turn, "kv", first, *shared, *own)
    assert reply.tokens == wanted and reply.storage == STORED
    blocks = list((tmp_path / "s").glob(BLOCKS))
    assert len(blocks) >= 12, "of three kinds of servers"
    for path in blocks:
        forge(path)
    reply, stats = run_in_child(second_turn, "kv", first, *shared, *own)
    assert reply.tokens == wanted and reply.cached == 0 and stats["remote_forged"] >= 1


def forge(path: Path) -> None:
    """Another block's bytes under the same names, with digests that fit, by nobody's key."""
    raw = bytearray(path.read_bytes())
    header = BlockHeader.unpack(memoryview(raw))
    raw[header.header_bytes :] = raw[header.header_bytes :][::-1]
    chunks, at = [], 0
    for layer, length, _ in header.table:
        chunks.append((layer, at, length))
        at += length
    model = StoredModel.of(chunks, header.fingerprint, "", header.part)
    block = Block(header.block_id, header.parent_id, header.label, header.position, header.tokens)
    page, data = memoryview(raw)[: header.header_bytes], memoryview(raw)[header.header_bytes :]
    seal_block(page, data, block, model, header.created)
    path.write_bytes(raw)
