"""The config.json of a model, as users name it: the file itself or the folder that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_hc.errors import ConfigError, decode_json


def read_model_config(model: str) -> tuple[dict[str, Any], str]:
    """The parsed config.json, and its path. Raises ConfigError that names the path."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give a folder with a config.json, or the file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error})") from None
    return decode_json(text, dict[str, Any], str(path)), str(path)
