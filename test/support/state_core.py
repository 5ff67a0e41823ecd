"""SGLang's engine with recurrent layers on a CPU, and a conversation with it."""

from __future__ import annotations

from typing import Any

from support import state_kernels
from support.core import Core
from support.prompts import SMALL

STATES = "--max-mamba-cache-size", "24", "--max-running-requests", "4"


def engine(model: str, *flags: str, **options: Any) -> Core:
    """model: path of one of `state_model`."""
    state_kernels.use()
    return Core(*SMALL, *STATES, *flags, model=model, **options)
