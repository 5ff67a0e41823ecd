"""Profile files: given ones that fit, and a cache that is never trusted blindly."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_hc import profile_file
from sglang_hc.errors import ConfigError
from sglang_hc.policy.cost_model import SourceTier
from support.profiles import cost_model, write

HERE = "llama 1234, H200"
COST = replace(cost_model(host=1e-6), fingerprint=HERE)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "sglang-hc"


def test_what_was_measured_is_found_at_the_next_start(cache: Path) -> None:
    assert profile_file.load_cached(HERE) is None
    profile_file.save_cached(COST)
    assert profile_file.load_cached(HERE) == COST
    assert profile_file.load_cached("llama 1234, A100") is None
    assert [path.name for path in cache.iterdir()] == [profile_file.cache_path(HERE).name]


@pytest.mark.parametrize(
    "text", ["", "{", '{"format": "sglang-hc cost model"}', COST.to_json()[:-40], "\x00" * 99]
)
def test_a_damaged_cache_file_is_said_and_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    profile_file.save_cached(COST)
    profile_file.cache_path(HERE).write_text(text)
    assert profile_file.load_cached(HERE) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "measuring again" in caplog.text


def test_a_cache_file_of_another_server_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    profile_file.save_cached(COST)
    profile_file.cache_path(HERE).write_text(replace(COST, fingerprint="A100").to_json())
    assert profile_file.load_cached(HERE) is None
    assert "measured for 'A100'" in caplog.text


def test_a_cache_that_cannot_be_written_does_no_harm(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the folder should be")
    profile_file.save_cached(COST)
    assert "not kept for later starts" in caplog.text
    assert profile_file.load_cached(HERE) is None


def test_a_given_profile_must_be_this_servers_and_name_its_tiers(tmp_path: Path) -> None:
    both = (SourceTier.HOST, SourceTier.DISK)
    path = write(COST, tmp_path)
    assert profile_file.load_given(path, HERE, both) == COST
    with pytest.raises(ConfigError, match=r"--hc-profile: .*measured for .*sglang-hc profile"):
        profile_file.load_given(path, "llama 1234, A100", both)
    only_host = replace(COST, copies={SourceTier.HOST: COST.copies[SourceTier.HOST]})
    path = write(only_host, tmp_path)
    assert profile_file.load_given(path, HERE, both[:1]) == only_host
    with pytest.raises(ConfigError, match=r"no costs for disk; write a new one with sglang-hc"):
        profile_file.load_given(path, HERE, both)
    with pytest.raises(ConfigError, match=r"--hc-profile: .*cannot be read"):
        profile_file.load_given(str(tmp_path / "none.json"), HERE, both)
