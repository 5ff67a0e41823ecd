"""A remote store under SGLang's real scheduler: two servers, and one directory or one store of
files between them."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_hc.store.disk.format import Block, BlockHeader, StoredModel, seal_block
from support.core import MODELS, Core, run_in_child
from support.stored_files import in_files
from support.waiting import until

FLAGS = ("--max-total-tokens", "640", "--hc-host-size-gb", "0.2")
PROMPT = random.Random(3).choices(range(3, 900), k=200)
FOLLOW = random.Random(4).choices(range(3, 900), k=20)


def in_directory(folder: str) -> tuple[str, ...]:
    return "--hc-remote", "file", "--hc-remote-config", json.dumps({"dir": f"{folder}:1"})


KINDS = {"file": in_directory, "dynamic": in_files}


def server(
    form: str,
    directory: str,
    *flags: str,
    dtype: str = "float32",
    model: str = "llama-mha",
    kind: str = "file",
) -> Core:
    remote = KINDS[kind](directory)
    return Core("--hc-forms", form, "--dtype", dtype, *remote, *flags, *FLAGS, model=model)


def first_turn(
    form: str, directory: str, *flags: str, model: str = "llama-mha", kind: str = "file"
) -> tuple:
    core = server(form, directory, *flags, model=model, kind=kind)
    reply = core.ask(PROMPT, 60)
    core.settle()
    return reply.tokens, core.tree.stats()


def second_turn(
    form: str, directory: str, history: list[int], flags: tuple[str, ...] = (),
    salt: str | None = None, dtype: str = "float32", kind: str = "file",
) -> tuple:  # fmt: skip
    core = server(form, directory, *flags, dtype=dtype, kind=kind)
    reply = core.ask(history, 24, salt)
    core.settle()
    shown = type(core.tree.cache_controller.storage_backend).__name__
    return reply, core.tree.stats(), shown


def both_turns(form: str) -> tuple[list[int], list[int]]:
    """A server that never stopped and never evicted."""
    core = Core("--hc-forms", form, "--dtype", "float32", *FLAGS)
    first = core.ask(PROMPT, 60).tokens
    return first, core.ask([*PROMPT, *first, *FOLLOW], 24).tokens


@pytest.mark.parametrize("form", ["hidden", "kv"])
@pytest.mark.parametrize(("kind", "name"), [("file", "file"), ("dynamic", "Files")])
def test_one_server_goes_on_with_what_another_computed(
    models: None, tmp_path: Path, form: str, kind: str, name: str
) -> None:
    def first_of_kind(form: str, directory: str) -> tuple:
        return first_turn(form, directory, kind=kind)

    def second_of_kind(form: str, directory: str, history: list[int]) -> tuple:
        return second_turn(form, directory, history, kind=kind)

    first, wanted = run_in_child(both_turns, form)
    tokens, stats = run_in_child(first_of_kind, form, str(tmp_path))
    assert tokens == first
    assert stats["remote_saved_blocks"] == 4
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats, shown = run_in_child(second_of_kind, form, str(tmp_path), history)
    assert reply.storage == 256 == stats["restored_tokens"]  # all full blocks of 260 tokens
    assert stats["remote_loaded_blocks"] == 4
    assert reply.tokens == wanted
    assert shown == name


def second_turn_uninterrupted(directory: str, history: list[int]) -> int:
    """Tokens that come from the store when no thread is made to let go of the interpreter."""
    core = server("kv", directory, kind="dynamic")
    sys.setswitchinterval(1e6)
    return core.ask(history, 1).storage


def first_of_files(directory: str) -> tuple:
    return first_turn("kv", directory, kind="dynamic")


def test_passes_without_a_batch_let_the_store_be_read(models: None, tmp_path: Path) -> None:
    first, _ = run_in_child(first_of_files, str(tmp_path))
    history = [*PROMPT, *first, *FOLLOW]
    assert run_in_child(second_turn_uninterrupted, str(tmp_path), history) == 256


def test_who_differs_in_plan_dtype_or_namespace_finds_nothing(models: None, tmp_path: Path) -> None:
    first, _ = run_in_child(first_turn, "kv", str(tmp_path))
    history = [*PROMPT, *first, *FOLLOW]
    for form, other in (
        ("hidden", {}),
        ("kv", {"dtype": "bfloat16"}),
        ("kv", {"salt": "other"}),
    ):
        reply, stats, _ = run_in_child(
            lambda f, o: second_turn(f, str(tmp_path), history, **o), form, other
        )
        assert reply.cached == 0
        assert "remote_loaded_blocks" not in stats


def turn_with_model(directory: str, model: str, history: list[int]) -> tuple:
    core = server("kv", directory, model=model)
    reply = core.ask(history, 24)
    core.settle()
    return reply, core.tree.stats()


def first_turn_of(directory: str, model: str) -> tuple:
    return first_turn("kv", directory, model=model)


def test_other_weights_under_the_same_path_find_nothing(models: None, tmp_path: Path) -> None:
    """Two hosts may keep different checkpoints in the same place."""
    model = tmp_path / "model"
    shutil.copytree(MODELS / "llama-mha", model)
    first, stats = run_in_child(first_turn_of, str(tmp_path), str(model))
    assert stats["remote_saved_blocks"] == 4
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, file, {"format": "pt"})
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats = run_in_child(turn_with_model, str(tmp_path), str(model), history)
    assert reply.cached == 0
    assert "remote_loaded_blocks" not in stats


def test_the_same_checkpoint_in_another_place_is_found(models: None, tmp_path: Path) -> None:
    """Hosts mount a checkpoint where they like."""
    model = tmp_path / "elsewhere"
    shutil.copytree(MODELS / "llama-mha", model)
    first, _ = run_in_child(first_turn, "kv", str(tmp_path))
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats = run_in_child(turn_with_model, str(tmp_path), str(model), history)
    assert reply.storage == 256
    assert stats["remote_loaded_blocks"] == 4


def test_a_disk_and_a_remote_store_together(models: None, tmp_path: Path) -> None:
    """The first block comes from the disk, the rest from the store."""
    first, wanted = run_in_child(both_turns, "hidden")
    shared = str(tmp_path / "shared")
    disk = ("--hc-disk", f"{tmp_path / 'd'}:1")
    _, stats = run_in_child(first_turn, "hidden", shared, *disk)
    assert stats["remote_saved_blocks"] == 4 == stats["disk_saved_blocks"]
    other = ("--hc-disk", f"{tmp_path / 'e'}:1")
    run_in_child(second_turn, "hidden", str(tmp_path / "none"), PROMPT[:70], other)
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats, shown = run_in_child(second_turn, "hidden", shared, history, other)
    assert (stats["disk_loaded_blocks"], stats["remote_loaded_blocks"]) == (1, 3)
    assert reply.storage == 256
    assert reply.tokens == wanted
    assert shown == "disk+file"


def test_damage_in_the_store_is_recomputed(models: None, tmp_path: Path) -> None:
    first, wanted = run_in_child(both_turns, "kv")
    run_in_child(first_turn, "kv", str(tmp_path))
    rng = random.Random(0)
    for value in tmp_path.glob("sglang-hc/*-*/?/?/*"):
        with value.open("r+b") as file:
            file.seek(rng.randrange(value.stat().st_size))
            file.write(b"\xa5\x5a")
    history = [*PROMPT, *first, *FOLLOW]
    reply, stats, _ = run_in_child(second_turn, "kv", str(tmp_path), history)
    assert reply.cached == 0
    assert stats["remote_read_damaged"] >= 1
    assert reply.tokens == wanted


def with_key(key: Path, secret: bytes) -> tuple[str, ...]:
    key.write_bytes(secret)
    key.chmod(0o600)
    return "--hc-remote-key", str(key)


def test_only_servers_with_the_same_key_share_a_directory(models: None, tmp_path: Path) -> None:
    """Others find nothing there, and make no error of it; a block that is put there without the
    key is forged."""
    first, wanted = run_in_child(both_turns, "kv")
    shared, history = str(tmp_path / "shared"), [*PROMPT, *first, *FOLLOW]
    own = with_key(tmp_path / "key", b"a" * 16)
    _, stats = run_in_child(first_turn, "kv", shared, *own)
    assert stats["remote_saved_blocks"] == 4
    for flags in ((), with_key(tmp_path / "other", b"b" * 16)):
        reply, stats, _ = run_in_child(second_turn, "kv", shared, history, flags)
        assert reply.tokens == wanted and reply.cached == 0
        assert not any(name.startswith("remote_read") for name in stats)
    reply, stats, _ = run_in_child(second_turn, "kv", shared, history, own)
    assert reply.tokens == wanted and reply.storage == 256
    blocks = list(Path(shared).glob("sglang-hc/*-*/?/?/*"))
    assert len(blocks) > 12, "of three kinds of servers"
    for path in blocks:
        forge(path)
    reply, stats, _ = run_in_child(second_turn, "kv", shared, history, own)
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


def cleared(directory: str) -> tuple:
    core = server("hidden", directory)
    first = core.ask(PROMPT, 60)
    core.settle()
    ended: list[bool] = []
    core.tree.clear_storage_backend(ended.append)
    until(lambda: core.run(1) or ended)
    files = list(Path(directory).glob("sglang-hc/*-*/?/?/*"))
    assert core.scheduler.flush_cache()
    return core.ask([*PROMPT, *first.tokens, *FOLLOW], 24), files, ended


def test_clear_empties_the_store(models: None, tmp_path: Path) -> None:
    reply, files, ended = run_in_child(cleared, str(tmp_path))
    assert reply.cached == 0 and ended == [True]
    assert files == []
