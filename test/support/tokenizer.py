"""What the tokenizer process makes of a request before the scheduler gets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def tokenizers_part(
    args: Any, limit: int, tokens: list[int], salt: str | None, sampling: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """Cuts a prompt that is longer than `limit`, in place, as the flags say. Returns the request's
    key and its options of sampling."""
    from sglang_hc.srt.requests.namespaces import client_key
    from sglang_hc.srt.requests.overflow import cut_prompt

    request = SimpleNamespace(
        sampling_params=sampling,
        extra_key=client_key(None, salt),
        return_logprob=False,
        contains_mm_input=lambda: False,
        input_embeds=None,
        session_params=None,
    )
    cut_prompt(SimpleNamespace(server_args=args, max_req_input_len=limit), request, tokens)
    return request.extra_key, request.sampling_params
