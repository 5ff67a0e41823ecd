"""`DELETE /hc/state` as the scheduler gets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from sglang_hc.tree.identity import Prefix, pack_tokens
from support import waiting
from support.core import Core


def ask_to_forget(
    core: Core, tokens: Sequence[int] = (), client: str | None = "k4:acme"
) -> Callable[[], dict[str, Any] | None]:
    """Through the scheduler's control request. Returns what tells the answer, once there is one."""
    from sglang.srt.managers.io_struct import DumperControlReqInput

    from sglang_hc.srt.requests.forgetting import METHOD

    body = {"client": client, "tokens": list(tokens)}
    answers: list[Any] = []
    core.scheduler.ipc_channels = SimpleNamespace(
        send_to_tokenizer=SimpleNamespace(
            send_output=lambda output, request=None: answers.append(output)
        )
    )
    core.inbox.append(DumperControlReqInput(method=METHOD, body=body))

    def answer() -> dict[str, Any] | None:
        core.run(1)
        found = [one.response[0] for one in answers if hasattr(one, "response")]
        return found[0] if found else None

    return answer


def forgotten(core: Core, **what: Any) -> dict[str, Any]:
    channels = core.scheduler.ipc_channels
    answer = ask_to_forget(core, **what)
    waiting.until(answer)
    found = answer()
    core.scheduler.ipc_channels = channels
    return found


def held_by_host(core: Core, tokens: Sequence[int], salt: str | None) -> int:
    return core.tree.tiers.host.tree.match(Prefix(salt, pack_tokens(tokens))).tokens
