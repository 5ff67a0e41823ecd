"""Options: flags, JSON, sizes within the memory there is, messages that name the option."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest

from sglang_hc import config, memory
from sglang_hc.command_line import add_flags, config_from
from sglang_hc.config import GIB, ConfigError, HcConfig
from sglang_hc.store.ownership import read_remote_key


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 64 GiB, 32 of them free, with no control groups; files to be added to."""

    class Rooted:
        def __new__(cls, path: str) -> Path:  # type: ignore[misc]
            return tmp_path / path.lstrip("/")

    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
    )
    monkeypatch.setattr(memory, "Path", Rooted)
    return tmp_path


def limit_group(machine: Path, name: str, limit: str, used: int, cache: int) -> None:
    folder = machine / "sys/fs/cgroup" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cache}\ninactive_file {cache}\n")


def parse(*argv: str) -> HcConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return config_from(parser.parse_args(argv))


def test_flags_become_a_config(machine: Path) -> None:
    assert parse() == HcConfig()
    wanted = HcConfig(1.5, "hidden:20,kv:12", True, ("/a:3", "/b"))
    assert wanted == parse(
        "--hc-host-size-gb", "1.5", "--hc-forms", "hidden:20,kv:12", "--hc-disable",
        "--hc-disk", "/a:3", "--hc-disk", "/b",
    )  # fmt: skip


def test_weights_in_host_memory_are_a_size_or_what_does_not_fit(machine: Path) -> None:
    assert parse("--hc-offload-gb", "12").offload_gb == 12
    assert parse("--hc-offload-gb", "auto").offload_gb == "auto"
    for text, wanted in (("3", 3), ("0.5", 0.5), ('"auto"', "auto")):
        found = HcConfig.from_json(f'{{"offload_gb": {text}}}')
        assert found.offload_gb == wanted and isinstance(found.offload_gb, float | str)


def test_state_of_running_requests_needs_weights_in_host_memory(machine: Path) -> None:
    found = parse("--hc-offload-gb", "2", "--hc-throughput", "act:0.5,rounds:3")
    assert found.throughput == "act:0.5,rounds:3"
    with pytest.raises(ConfigError, match=r"hc-throughput\) does nothing without --hc-offload-gb"):
        parse("--hc-throughput", "auto")
    with pytest.raises(ConfigError, match=r"\(--hc-throughput\): act:2: give a share"):
        parse("--hc-offload-gb", "2", "--hc-throughput", "act:2")


def test_help_lists_every_flag(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for name in HcConfig().to_dict():
        assert config.flag_of(name) in shown


def test_a_config_survives_json(machine: Path) -> None:
    wanted = HcConfig(1.5, "hidden", False, ("/a:3",))
    assert HcConfig.from_json(json.dumps(wanted.to_dict())) == wanted


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hc-host-size-gb", "many"], "--hc-host-size-gb: invalid float value: 'many'"),
        (["--hc-overflow-reserve", "1.5"], "--hc-overflow-reserve: invalid int value: '1.5'"),
        (["--hc-remote", "floppy"], "--hc-remote: invalid choice: 'floppy' .*'file'"),
    ],
)
def test_what_a_parser_cannot_read_is_named_with_status_2(
    machine: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(*argv)
    assert exit_.value.code == 2
    assert re.search(f"argument {message}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hc-host-size-gb", "0"], "must be above 0 GiB"),
        (["--hc-host-size-gb", "nan"], "must be above 0 GiB"),
        (["--hc-host-size-gb", "65"], "65 GiB is larger than"),
        (["--hc-offload-gb", "all"], "must be GiB or auto, got 'all'"),
        (["--hc-offload-gb", "-1"], "must be 0 or more GiB, or auto, got -1"),
        (["--hc-offload-gb", "inf"], "must be 0 or more GiB, or auto"),
        (["--hc-offload-gb", "nan"], "must be 0 or more GiB, or auto"),
        (["--hc-forms", "fast"], "layer plan 'fast'"),
        (["--hc-forms", "kv:2,hidden:2"], ".*in the order"),
        (["--hc-disk", ""], ""),
        (["--hc-disk", "/a:0"], ""),
        (["--hc-remote-config", "{"], "the text: not valid JSON"),
        (["--hc-remote-config", "[]"], r"'\[\]' is neither a JSON object nor"),
        (["--hc-remote-config", "/none.json"], "'/none.json' is neither"),
        (["--hc-trace", "/"], "'/': is a directory; give a file to make"),
        (["--hc-trace", "/nowhere/t.jsonl"], ".*no directory /nowhere"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(machine: Path, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"\({argv[0]}\): {message}"):
        parse(*argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "SGLANG_HC_CONFIG: not valid JSON"),
        ("[]", "SGLANG_HC_CONFIG: Expected `object`, got `array`"),
        ('{"host_size": 1}', "unknown host_size; known are audit"),
        ('{"host_size_gb": true}', r"got `bool` - at `\$.host_size_gb`"),
        (
            '{"host_size_gb": -1}',
            r": host_size_gb \(--hc-host-size-gb\): must be above 0",
        ),
        ('{"forms": "fast"}', r": forms \(--hc-forms\): layer plan 'fast'"),
        (
            '{"eviction": "mru"}',
            r": eviction \(--hc-eviction\): 'mru' is not one of queue, lru",
        ),
        ('{"disk": "/a"}', r"Expected `array`, got `str` - at `\$.disk`"),
        ('{"disk": [1]}', r"Expected `str`, got `int` - at `\$.disk\[0\]`"),
    ],
)
def test_a_wrong_field_is_named(machine: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HcConfig.from_json(text)


def test_options_of_a_remote_store_may_come_from_a_file(machine: Path) -> None:
    file = machine / "remote.json"
    file.write_text('{"dir": "/a"}')
    found = parse("--hc-remote", "file", "--hc-remote-config", str(file))
    assert config.read_remote_config(found.remote_config) == {"dir": "/a"}
    assert config.read_remote_config('{"dir": "/a"}') == {"dir": "/a"}
    assert config.read_remote_config(None) == {}
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="Expected `object`, got `array`"):
        HcConfig(remote="file", remote_config=str(file))


def test_a_shared_directory_may_begin_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell looks into the options."""
    monkeypatch.setenv("HOME", "/home/me")
    found = HcConfig(remote="file", remote_config='{"dir": "~/shared:200"}')
    assert config.shared_directory(found) == "/home/me/shared:200"


def key_file(folder: Path, length: int, mode: int = 0o600) -> Path:
    file = folder / "key"
    file.unlink(missing_ok=True)
    file.write_bytes(b"secret" * 3 + b"\n" * length)
    os.truncate(file, length)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_key_of_a_remote_store_is_at_least_16_bytes_of_a_private_file(
    machine: Path, mode: int
) -> None:
    file = key_file(machine, 16, mode)
    found = parse("--hc-remote", "file", "--hc-remote-key", str(file))
    assert read_remote_key(found.remote_key) == b"secretsecretsecr"
    assert "secretsecret" not in repr(found) + json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("length", "mode", "message"),
    [
        (15, 0o600, r"remote_key \(--hc-remote-key\): .*holds 15 bytes; give .* at least 16"),
        (16, 0o640, r"remote_key .* can be used by others; run chmod 600"),
        (16, 0o604, r"remote_key .* can be used by others; run chmod 600"),
        (16, 0o602, r"remote_key .* can be used by others; run chmod 600"),
    ],
)
def test_a_key_that_others_may_know_or_guess_is_refused(
    machine: Path, length: int, mode: int, message: str
) -> None:
    file = key_file(machine, length, mode)
    with pytest.raises(ConfigError, match=message) as refused:
        HcConfig(remote="file", remote_key=str(file))
    assert "secretsecret" not in str(refused.value)


def test_a_key_that_is_no_file_is_refused_at_once(machine: Path) -> None:
    pipe = machine / "pipe"
    os.mkfifo(pipe, 0o600)
    for path, message in ((pipe, "holds 0 bytes"), (machine / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=message):
            HcConfig(remote="file", remote_key=str(path))


def test_the_default_size_is_a_share_of_what_is_free(machine: Path) -> None:
    assert config.host_bytes(HcConfig()) == int(32 * GIB * config.HOST_SHARE)
    assert config.host_bytes(HcConfig(host_size_gb=0.5)) == GIB // 2
    assert config.host_bytes(HcConfig(), 4) == int(32 * GIB * config.HOST_SHARE) // 4
    assert config.host_bytes(HcConfig(host_size_gb=0.5), 4) == GIB // 8


@pytest.mark.parametrize(("free", "processes", "gib"), [
    (639, 1, 255.6), (641, 1, 256), (2000, 1, 256), (2000, 2, 256), (2000, 8, 100),
])  # fmt: skip
def test_the_default_size_of_one_process_is_bounded(
    monkeypatch: pytest.MonkeyPatch, free: int, processes: int, gib: float
) -> None:
    """A host of 2 TB locked 800 GB in one call at its start, which takes minutes."""
    monkeypatch.setattr(config, "available_memory", lambda: free * GIB)
    assert config.host_bytes(HcConfig(), processes) == pytest.approx(gib * GIB)


def test_a_size_that_is_given_is_not_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "total_memory", lambda: 2000 * GIB)
    assert config.host_bytes(HcConfig(host_size_gb=800)) == 800 * GIB


def test_a_container_sees_its_own_limit_and_those_around_it(machine: Path) -> None:
    """File cache that can be dropped counts as free; the tightest group decides."""
    (machine / "proc/self/cgroup").write_text("0::/outer/inner\n")
    limit_group(machine, "", "max", 20 * GIB, 0)
    limit_group(machine, "outer", str(16 * GIB), 10 * GIB, 4 * GIB)
    limit_group(machine, "outer/inner", str(24 * GIB), 3 * GIB, 0)
    assert memory.total_memory() == 16 * GIB
    assert memory.available_memory() == 10 * GIB
    with pytest.raises(ConfigError, match=r"larger than this machine's memory \(16.0 GiB\)"):
        HcConfig(host_size_gb=17)


@pytest.mark.parametrize(
    ("others", "message"),
    [({"exact": True}, "--hc-exact and --hc-overflow"), ({"prefetch": "off"}, "--hc-prefetch off")],
)
def test_state_moves_only_with_what_it_needs(others: dict[str, Any], message: str) -> None:
    HcConfig(overflow="reembed")
    HcConfig(overflow="recompute", disk=("/d",), **others)
    with pytest.raises(ConfigError, match=message):
        HcConfig(overflow="reembed", **others)


def test_memory_that_a_balloon_holds_now_may_be_asked_for(machine: Path) -> None:
    """MemTotal is 64 GiB, and the machine was built with 100 in two zones."""
    pages = [40 * GIB // mmap.PAGESIZE, 60 * GIB // mmap.PAGESIZE]
    zones = [f"Node 0, zone Z{i}\n  spanned 9\n        present  {n}\n" for i, n in enumerate(pages)]
    (machine / "proc/zoneinfo").write_text("".join(zones))
    assert HcConfig(host_size_gb=100).host_size_gb == 100
    with pytest.raises(ConfigError, match=r"larger than this machine's memory \(100.0 GiB\)"):
        HcConfig(host_size_gb=101)
    (machine / "proc/zoneinfo").write_text("  present  many\n")
    with pytest.raises(ConfigError, match=r"larger than this machine's memory \(64.0 GiB\)"):
        HcConfig(host_size_gb=65)


def test_a_group_over_its_limit_has_nothing_free(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/full\n")
    limit_group(machine, "full", str(GIB), 2 * GIB, 0)
    assert memory.available_memory() == 0


def test_a_group_that_cannot_be_read_does_not_bound(machine: Path) -> None:
    (machine / "proc/self/cgroup").write_text("0::/gone\n")
    assert memory.available_memory() == 32 * GIB


def test_no_memory_information_asks_for_the_flag(machine: Path) -> None:
    (machine / "proc/meminfo").write_text("")
    with pytest.raises(ConfigError, match="give --hc-host-size-gb"):
        config.host_bytes(HcConfig())
