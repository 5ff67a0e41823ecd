"""A model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_hc.errors import ConfigError, decode_json, read_text


def read_model_config(model: str) -> tuple[dict[str, Any], str]:
    """The parsed config.json, and its path. Raises ConfigError that names the path."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a folder with a config.json, or the file")
    return decode_json(read_text(path, str(path)), dict[str, Any], str(path)), str(path)


def architecture_of(config: Mapping[str, Any]) -> str:
    """SGLang's class for a parsed config.json; empty where it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""
