"""HTTP routes beside SGLang's own: pins of sessions.

    POST /hc/pin    {"session", "ttl_s", "input_ids" or "text", "namespace"}
    POST /hc/unpin  {"session", "namespace"}
    GET  /hc/pins?namespace=

`namespace`: cache_salt followed by extra_key, as in the requests; none by default. Errors are
{"error": {"message"}} with status 400 (bad body), 404 (nothing to pin or unpin) and 409 (beyond a
bound).
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import DumperControlReqInput

from sglang_hc.srt.overflow import DroppedTokensHeader, cut_tokens
from sglang_hc.srt.pins import PREFIX, read_pin_request

router = APIRouter(prefix="/hc")


def mount(app: FastAPI) -> None:
    """Add the routes, and the header of cut prompts, to SGLang's application, before it serves."""
    app.include_router(router)
    app.add_middleware(DroppedTokensHeader)


@router.post("/pin")
async def pin(request: Request) -> JSONResponse:
    """Pin what the tiers have of a token sequence."""
    try:
        body = _object(await request.body())
        _known(body, "session", "ttl_s", "input_ids", "text", "namespace")
        asked = {name: body[name] for name in ("session", "ttl_s") if name in body}
        pin = read_pin_request(asked, "the body")
        session, namespace = _session(body), _namespace(body.get("namespace"))
        tokens, namespace = _tokens(body, namespace)
    except ValueError as error:
        return _bad(error)
    fields = {"session": session, "namespace": namespace, "tokens": tokens, "ttl_s": pin.seconds}
    return await _ask("pin", fields)


@router.post("/unpin")
async def unpin(request: Request) -> JSONResponse:
    """End a session's pin."""
    try:
        body = _object(await request.body())
        _known(body, "session", "namespace")
        fields = {"session": _session(body), "namespace": _namespace(body.get("namespace"))}
    except ValueError as error:
        return _bad(error)
    return await _ask("unpin", fields)


@router.get("/pins")
async def pins(namespace: str | None = None) -> JSONResponse:
    """The pins of one namespace."""
    return await _ask("list", {"namespace": namespace})


async def _ask(method: str, body: dict[str, Any]) -> JSONResponse:
    """Ask every scheduler (one per data-parallel rank); one that could is enough."""
    manager = get_global_state().tokenizer_manager
    results = await manager.dumper_control(DumperControlReqInput(method=PREFIX + method, body=body))
    replies = [reply for result in results for reply in result.response]
    good = [reply for reply in replies if reply["status"] == 200]
    reply = dict((good or replies)[0])
    status = reply.pop("status")
    if len(good) > 1:
        reply["blocks"] = sum(one.get("blocks", 0) for one in good)
        if "pins" in reply:
            reply["pins"] = [pin for one in good for pin in one["pins"]]
    return JSONResponse(reply, status)


def _tokens(body: dict[str, Any], namespace: str | None) -> tuple[list[int], str | None]:
    """The tokens whose blocks are pinned, and their namespace."""
    manager = get_global_state().tokenizer_manager
    tokens, text = body.get("input_ids"), body.get("text")
    if (tokens is None) == (text is None):
        raise ValueError("give the token ids as input_ids or their text as text, one of the two")
    if text is not None:
        if not isinstance(text, str):
            raise ValueError("text must be text")
        if manager.tokenizer is None:
            raise ValueError("this server has no tokenizer; give input_ids")
        tokens = manager.tokenizer.encode(text)
    if (
        not isinstance(tokens, list)
        or not tokens
        or any(type(token) is not int for token in tokens)
    ):
        raise ValueError("input_ids must be a list of token ids")
    vocabulary = manager.model_config.vocab_size
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise ValueError(f"input_ids has ids outside 0 to {vocabulary - 1}")
    tokens, namespace = cut_tokens(manager, tokens, namespace)
    most = manager.model_config.context_len
    if len(tokens) > most:
        raise ValueError(f"{len(tokens)} tokens; the model's context is {most}")
    return tokens, namespace


def _object(raw: bytes) -> dict[str, Any]:
    import orjson

    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    return body


def _known(body: dict[str, Any], *names: str) -> None:
    unknown = sorted(set(body) - set(names))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are {', '.join(names)}")


def _session(body: dict[str, Any]) -> str:
    session = body.get("session")
    if not isinstance(session, str) or not session:
        raise ValueError("the body needs session, the name of the pin")
    return session


def _namespace(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("namespace must be text: cache_salt followed by extra_key")
    return value


def _bad(error: ValueError) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, 400)
