"""`DELETE /hc/state` as the scheduler gets it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from sglang_hc.tree.identity import Prefix, pack_tokens
from support import waiting
from support.core import Core


def forgotten(
    core: Core, tokens: Sequence[int] = (), client: str | None = "k4:acme"
) -> dict[str, Any]:
    """The answer to the scheduler's control request."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    from sglang_hc.srt.requests.forgetting import METHOD

    channels, answers = core.scheduler.ipc_channels, list[dict[str, Any]]()

    def note(output: Any, request: Any = None) -> None:
        if hasattr(output, "response"):
            answers.append(output.response[0])

    core.scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(send_output=note)
    )
    body = {"client": client, "tokens": list(tokens)}
    core.inbox.append(DumperControlReqInput(method=METHOD, body=body))
    waiting.until(lambda: answers, lambda: core.run(1))
    core.scheduler.ipc_channels = channels
    return answers[0]


def held_by_host(core: Core, tokens: Sequence[int], salt: str | None) -> int:
    return core.tree.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).tokens
