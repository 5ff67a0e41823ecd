"""Fixtures of the tests of meetings."""

from __future__ import annotations

import pytest

from support.core import run_in_child
from support.meetings import halving_profile, undisturbed


@pytest.fixture(scope="session")
def wanted(models: None) -> dict[str, tuple[list[int], list[int]]]:
    """Both replies of a server that never evicts, by form."""
    return {form: run_in_child(undisturbed, form) for form in ("hidden", "kv", "hidden:2,kv:2")}


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By these costs half of a history is computed."""
    return halving_profile(tmp_path_factory.mktemp("profile"))
