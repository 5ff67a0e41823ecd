"""What several files compare with: servers that never evict."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING

import pytest

from support.core import Once, run_in_child
from support.meetings import Replies, halving_profile, undisturbed

if TYPE_CHECKING:
    from support.speculative_talks import Told


@pytest.fixture(scope="session")
def once(models: None) -> Once:
    """As `run_in_child`, for what is the same each time: the same call is made once, in whichever
    file, and each gets a copy of its result."""
    cached = functools.cache(run_in_child)
    return lambda *args: copy.deepcopy(cached(*args))


@pytest.fixture(scope="session")
def wanted(models: None) -> Replies:
    """Both replies of a conversation that is met elsewhere."""
    replies: Replies = run_in_child(undisturbed)
    return replies


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """By these costs half of a history is computed."""
    return halving_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def plain(once: Once) -> Told:
    """A conversation that is decoded speculatively elsewhere."""
    from support.speculative_talks import plainly  # it imports SGLang

    told: Told = once(plainly)
    return told
