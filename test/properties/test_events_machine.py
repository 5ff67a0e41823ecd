"""A mirror of KV events (`support/event_world.py`) is what the tiers hold, at every quiet point."""

from __future__ import annotations

from hypothesis import settings

from support.event_world import SEEN, EventMachine
from support.tiers_machine import PROFILE

EventMachine.TestCase.settings = settings(PROFILE, max_examples=60)  # fewer say not all of it
TestEvents = EventMachine.TestCase


def test_something_was_said_of_each_kind() -> None:
    """Runs last: a mirror of nothing is always right."""
    kinds = ("Stored", "Removed", "Cleared", "found", "lost batches", "DISK")
    assert all(SEEN[kind] for kind in kinds), SEEN
