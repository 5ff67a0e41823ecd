"""How a read or a write of a block ended. One enum for every store, disk and remote."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """The answer to a read or a write of one block. The value is the end of the metric's name.

    Only after OK does a read's slot hold the block; after any other answer the slot holds nothing
    that may be used. Only after OK does a written block survive the end of the process.
    """

    STUCK = "stuck"  # it was given up, and may touch its slot at any later time
    OK = "ok"
    MISSING = "missing"  # a read of a block that is not there
    DAMAGED = "damaged"  # the bytes are not the block that was asked for; it is removed
    IO_ERROR = "io_error"  # the store could not read or write it
    TIMED_OUT = "timed_out"  # the deadline passed before the operation was finished
    DUPLICATE = "duplicate"  # a write of a block that is there, or that another thread is writing
    NO_SPACE = "no_space"  # a write for which nothing could be evicted
    DROPPED = "dropped"  # a write given up: too many wait, or its store is busy or out of use


GOOD = (Outcome.OK, Outcome.DUPLICATE)
"""How an operation ends that has done what it was asked for: the block is there."""
