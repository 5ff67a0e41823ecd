"""The sub-tasks of L-Eval that HCache asks (Table 1)."""

from __future__ import annotations

from typing import NamedTuple


class ContextTask(NamedTuple):
    """Mean tokens of context, question and answer."""

    context: float
    question: float
    answer: float


TASKS = {
    "assistant": ContextTask(10603.5, 142.7, 404.8),
    "gsm100": ContextTask(5451.7, 77.4, 4.3),
    "quality": ContextTask(7053.9, 92.4, 19.2),
}
