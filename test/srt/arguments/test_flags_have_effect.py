"""No flag is without effect and silent: each of ours and of HiCache has one, or is refused.

The flags are those of the parser, so a new one fails here until it is in one of these groups.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sglang.srt import server_args as stock
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_memory, publish, reset_context
from sglang.srt.server_args import ServerArgs

from sglang_hc.config import FLAGS, ConfigError, flag_of
from sglang_hc.srt.arguments import hicache_flags
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments as binding
from sglang_hc.srt.binding.arguments import asked
from support.core import MODELS
from support.profiles import FREE_LOADING

KEY = str(Path(tempfile.gettempdir()) / f"sglang-hc-test-key-{os.getpid()}")
"""A file that `plugin` writes."""

ALONE = {
    "host_size_gb": "1", "forms": "hidden", "disable": None, "disk": "/tmp:1", "eviction": "lru",
    "trace": "/tmp/sglang-hc-no-such-trace",
    "restore": "always", "ttl": "3", "schedule": "ready-first",
    "overflow": "recompute", "exact": None, "open_routes": None,
    "audit": "1", "offload_gb": "auto",
    "profile": str(FREE_LOADING),
}  # fmt: skip
"""Flags that have an effect by themselves, with a value."""

SHARED = ("--hc-remote", "file", "--hc-remote-config", '{"dir": "/tmp:1"}')

WITH = {
    "remote": ("file", [SHARED[2:]]),
    "remote_config": (SHARED[3], [SHARED[:2]]),
    "remote_key": (KEY, [SHARED]),
    "prefetch": (
        "queue",
        [("--hc-disk", "/tmp:1"), SHARED, ("--hc-overflow", "reembed")],
    ),
    "write": ("second-use", [("--hc-disk", "/tmp:1"), SHARED]),
    "throughput": ("auto", [("--hc-offload-gb", "auto")]),
    **{
        name: (value, [("--hc-overflow", "recompute"), ("--hc-overflow", "reembed")])
        for name, value in (
            ("overflow_keep_first", "64"), ("overflow_drop", "0.5"), ("overflow_reserve", "1024")
        )
    },
}  # fmt: skip
"""Flags that need another one: a value (a default too is refused), and each flag that will do."""

HICACHE = {
    "--enable-hierarchical-cache": None,
    "--hicache-host-memory-mode": "cache",
    "--hicache-ratio": "2.0",
    "--hicache-size": "0",
    "--hicache-host-memory-fraction": "0.8",
    "--hicache-write-policy": "write_through",
    "--hicache-io-backend": "kernel",
    "--hicache-mem-layout": "page_first",
    "--hicache-storage-backend": "file",
    "--hicache-storage-prefetch-policy": "timeout",
    "--hicache-storage-prefetch-retry-poll-interval": "8",
    "--hicache-storage-prefetch-retry-max-attempts": "8",
    "--hicache-storage-backend-extra-config": "{}",
}
"""With a value, the default where there is one: what is given explicitly is refused."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch, models: None, tmp_path: Path) -> Iterator[None]:
    load_plugins()
    Path(KEY).touch(mode=0o600)
    Path(KEY).write_bytes(bytes(16))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    monkeypatch.delenv("SGLANG_HC_ENABLE", raising=False)
    monkeypatch.delenv("SGLANG_HC_CONFIG", raising=False)
    before = logging.root.handlers[:], logging.root.level
    yield
    Path(KEY).unlink()
    logging.root.handlers[:], logging.root.level = before  # SGLang's parser sets its own


CPU = ("--device", "cpu")
MODEL = ("--model-path", str(MODELS / "llama-mha"))


def parsed(*words: str | None) -> ServerArgs:
    args = stock.prepare_server_args([*MODEL, *(word for word in words if word is not None)])
    args.resolve_once()
    return args


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_every_flag_is_in_one_group() -> None:
    words = {word for action in parser()._actions for word in action.option_strings}
    ours = {word for word in words if word.startswith("--hc-")}
    assert ours == {flag_of(name) for name in (*ALONE, *WITH)}
    assert not ALONE.keys() & WITH.keys()
    theirs = {word for word in words if "hicache" in word or "hierarchical-cache" in word}
    assert theirs == {*HICACHE, "--enable-hicache"}  # another name of the first
    assert {name for name, flag in FLAGS.items() if flag.need is not None} | {"remote"} == set(WITH)


@pytest.mark.parametrize("name", ALONE)
def test_a_flag_by_itself_is_taken_as_it_is(name: str) -> None:
    args = parsed(flag_of(name), ALONE[name])
    config = config_of(args)
    if name == "disable":
        assert config is None
    else:
        assert config is not None and name in config.changed()


@pytest.mark.parametrize("name", WITH)
def test_a_flag_without_the_one_it_needs_is_refused(name: str) -> None:
    value, others = WITH[name]
    with pytest.raises(ConfigError) as refused:
        parsed(flag_of(name), value)
    said = str(refused.value)
    assert flag_of(name) in said
    for other in others:
        assert other[0] in said
        config = config_of(parsed(flag_of(name), value, *other))
        assert config is not None


@pytest.mark.parametrize("switch", ["a flag", "a default given", "SGLANG_HC_ENABLE", "the options"])
@pytest.mark.parametrize("flag", HICACHE)
def test_hicaches_flags_are_refused_beside_the_tiers(
    flag: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: tuple[str, ...] = ()
    if switch == "SGLANG_HC_ENABLE":
        monkeypatch.setenv("SGLANG_HC_ENABLE", "1")
    elif switch == "the options":
        monkeypatch.setenv("SGLANG_HC_CONFIG", "{}")
    else:
        ours = ("--hc-forms", "kv" if switch == "a flag" else "auto")
    with pytest.raises(ConfigError, match=f"nothing reads {flag} .*; leave it out, or add"):
        parsed(flag, HICACHE[flag], *ours)


def test_one_sentence_names_all_of_them() -> None:
    with pytest.raises(ConfigError, match=r"--hicache-ratio \(--hc-host-.*--hicache-io-backend"):
        parsed("--hicache-ratio", "3", "--hicache-io-backend", "direct", "--hc-forms", "kv")


def test_without_the_tiers_they_are_hicaches() -> None:
    plain = parsed(*CPU)
    defaults = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
    for name in hicache_flags.INSTEAD:
        assert getattr(plain, name) == defaults[name], name
    for ours in ((), ("--hc-disable",)):
        args = parsed("--hicache-ratio", "3", "--hicache-write-policy", "write_back", *CPU, *ours)
        assert (asked(args, "hicache_ratio"), args.hicache_write_policy) == (3, "write_back")
        assert asked(args, "radix_cache_backend") is None
        assert not asked(args, "enable_hierarchical_cache")


def test_what_was_decided_goes_into_other_processes() -> None:
    """They get SGLang's arguments pickled, resolve nothing, and serve with what was decided."""
    sent = pickle.loads(pickle.dumps(parsed("--hc-forms", "hidden")))
    config = config_of(sent)
    assert config is not None and config.forms == "hidden"
    publish(sent, role="scheduler")
    try:
        memory = get_memory()
        assert memory.radix_cache_backend == "hc" and memory.enable_hierarchical_cache
        assert memory.hicache_storage_backend == "file"
        # SGLang sizes no host pool by what is free, sets no device memory aside, asks only once.
        assert memory.hicache_host_memory_fraction is None
        assert memory.hicache_mem_layout == "layer_first"
        assert memory.hicache_storage_prefetch_retry_max_attempts == 0
        assert binding.attention_backend(sent) == "torch_native"
        get_context().override("test", attention_backend="triton")
        assert binding.attention_backend(sent) == "triton", "what the process serves with"
    finally:
        reset_context()
    assert binding.attention_backend(sent) == "torch_native"


def test_the_embedded_engine_refuses_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**options: Any) -> ServerArgs:
        made = ServerArgs(model_path=MODEL[1], **options)
        made.resolve_once()
        return made

    monkeypatch.setenv("SGLANG_HC_CONFIG", "{}")
    made = engine()
    copy = msgspec.structs.replace(made)
    copy.resolve_once()
    assert config_of(made) is not None and config_of(copy) is not None
    with pytest.raises(ConfigError, match="nothing reads --hicache-size "):
        engine(hicache_size=3)


def test_a_file_of_options_is_read_as_flags_are(tmp_path: Path) -> None:
    def read(**options: Any) -> ServerArgs:
        file = tmp_path / "options.yaml"
        file.write_text(json.dumps(options))
        return parsed("--config", str(file))

    for disks in ("/tmp:1", ["/tmp:1", "/var/tmp:1"]):
        config = config_of(read(**{"hc-disk": disks}))
        assert config is not None
        assert config.disk == ((disks,) if isinstance(disks, str) else tuple(disks))
    with pytest.raises(ConfigError, match="--hicache-ratio"):
        read(**{"hc-forms": "kv", "hicache-ratio": 2.0})
    with pytest.raises(ConfigError, match="does nothing without --hc-remote"):
        read(**{"hc-remote-config": "{}"})


def test_options_come_from_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HC_CONFIG", '{"forms": "kv"}')
    with pytest.raises(
        ConfigError, match=r"SGLANG_HC_CONFIG and --hc-schedule: .* unset SGLANG_HC_CON"
    ):
        parsed("--hc-schedule", "off")
    monkeypatch.setenv("SGLANG_HC_ENABLE", "1")  # as our launcher does
    config = config_of(parsed())
    assert config is not None and config.forms == "kv"


def test_what_is_switched_off_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A record is made without tiers too."""
    with caplog.at_level("WARNING", logger="sglang_hc"):
        logging.getLogger("sglang_hc").addHandler(caplog.handler)
        parsed("--hc-disable", "--hc-ttl", "3", "--hc-trace", str(tmp_path / "t.jsonl"))
    logging.getLogger("sglang_hc").removeHandler(caplog.handler)
    assert "--hc-disable: --hc-ttl without effect" in caplog.text
