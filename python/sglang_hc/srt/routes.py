"""HTTP routes beside SGLang's own: pins of sessions.

    POST /hc/pin    {"session", "ttl_s", "input_ids" or "text", "cache_salt", "extra_key"}
    POST /hc/unpin  {"session", "cache_salt", "extra_key"}
    GET  /hc/pins?cache_salt=&extra_key=

`cache_salt`, `extra_key`: as in the requests; none by default. Errors are {"error": {"message"}}
with status 400 (bad body), 404 (nothing to pin or unpin) and 409 (beyond a bound).
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import DumperControlReqInput

from sglang_hc.errors import decode_json
from sglang_hc.srt.overflow import DroppedTokensHeader, cut_tokens
from sglang_hc.srt.pins import PREFIX, PinSeconds, SessionName, joined
from sglang_hc.tree.namespaces import client_namespace

router = APIRouter(prefix="/hc")


def mount(app: FastAPI) -> None:
    """Add the routes, and the header of cut prompts, to SGLang's application, before it serves."""
    app.include_router(router)
    app.add_middleware(DroppedTokensHeader)


class UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /hc/unpin."""

    session: SessionName
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str | None:
        """Of requests with the same salt and key. Raises ValueError for users."""
        return client_namespace(self.cache_salt or None, self.extra_key)


class PinBody(UnpinBody, kw_only=True, forbid_unknown_fields=True):
    """Body of /hc/pin, with one of `input_ids` and `text`."""

    ttl_s: PinSeconds
    input_ids: list[int] | None = None
    text: str | None = None


@router.post("/pin")
async def pin(request: Request) -> JSONResponse:
    """Pin what the tiers have of a token sequence."""
    try:
        body = decode_json(await request.body(), PinBody, "the body")
        tokens, namespace = _tokens(body)
    except ValueError as error:
        return _bad(error)
    fields = {"session": body.session, "namespace": namespace, "tokens": tokens}
    return await _ask("pin", {**fields, "ttl_s": body.ttl_s})


@router.post("/unpin")
async def unpin(request: Request) -> JSONResponse:
    """End a session's pin."""
    try:
        body = decode_json(await request.body(), UnpinBody, "the body")
        fields = {"session": body.session, "namespace": body.namespace}
    except ValueError as error:
        return _bad(error)
    return await _ask("unpin", fields)


@router.get("/pins")
async def pins(cache_salt: str | None = None, extra_key: str | None = None) -> JSONResponse:
    """The pins of one namespace."""
    try:
        namespace = client_namespace(cache_salt or None, extra_key)
    except ValueError as error:
        return _bad(error)
    return await _ask("list", {"namespace": namespace})


async def _ask(method: str, body: dict[str, Any]) -> JSONResponse:
    """Ask every scheduler (one per data-parallel rank)."""
    manager = get_global_state().tokenizer_manager
    results = await manager.dumper_control(DumperControlReqInput(method=PREFIX + method, body=body))
    reply = joined([reply for result in results for reply in result.response])
    return JSONResponse(reply, reply.pop("status"))


def _tokens(body: PinBody) -> tuple[list[int], str | None]:
    """The tokens whose blocks are pinned, and their namespace."""
    manager = get_global_state().tokenizer_manager
    tokens = body.input_ids
    if (tokens is None) == (body.text is None):
        raise ValueError("give the token ids as input_ids or their text as text, one of the two")
    if body.text is not None:
        if manager.tokenizer is None:
            raise ValueError("this server has no tokenizer; give input_ids")
        tokens = manager.tokenizer.encode(body.text)
    if not tokens:
        raise ValueError("input_ids and text may not be empty")
    vocabulary = manager.model_config.vocab_size
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise ValueError(f"input_ids has ids outside 0 to {vocabulary - 1}")
    tokens, namespace = cut_tokens(manager, tokens, body.namespace)
    most = manager.model_config.context_len
    if len(tokens) > most:
        raise ValueError(f"{len(tokens)} tokens; the model's context is {most}")
    return tokens, namespace


def _bad(error: ValueError) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, 400)
