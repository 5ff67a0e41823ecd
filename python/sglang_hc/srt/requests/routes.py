"""HTTP routes beside SGLang's own: pins of sessions, soft retention, and forgetting.

    POST   /hc/pin       {"session", "ttl_s", "input_ids" or "text", "cache_salt", "extra_key"}
    POST   /hc/unpin     {"session", "cache_salt", "extra_key"}
    POST   /hc/retain    {"ttl_s", "priority", STATE}
    POST   /hc/prefetch  {STATE}
    POST   /hc/demote    {STATE}
    GET    /hc/pins?cache_salt=&extra_key=
    DELETE /hc/state     {STATE}, or a client alone: all of it

STATE: "session", or "input_ids" or "text", or one of these with the name of a session; and the
client. `cache_salt`, `extra_key`: as in the requests; none by default. Errors are
{"error": {"message"}} with status 400 (bad body), 403 (not open to this caller), 404 (nothing to
pin or unpin, unknown session), 409 (beyond a bound) and 503 (not everything was forgotten).

Whoever has the key of --admin-api-key may use all of them, and nobody else. Without such a key
those with the key of --api-key may use those with POST, and are not told what the tiers have:
whether a block is there says what others have asked. Without any key the routes are off. With
--hc-open-routes everybody whom SGLang lets through counts as an administrator.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from msgspec import Meta
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import DumperControlReqInput
from sglang.srt.utils.auth import AuthLevel, auth_level, decide_request_auth

from sglang_hc.errors import decode_json
from sglang_hc.srt.arguments.server_args import config_of
from sglang_hc.srt.binding import arguments
from sglang_hc.srt.requests import retaining
from sglang_hc.srt.requests.agents import MOST_PRIORITY, RetainSeconds
from sglang_hc.srt.requests.forgetting import METHOD, joined_answers
from sglang_hc.srt.requests.overflow import DroppedTokensHeader, cut_tokens
from sglang_hc.srt.requests.pins import PREFIX, PinSeconds, SessionName, joined
from sglang_hc.tree.namespaces import client_namespace


def mount(app: FastAPI) -> None:
    """Add the routes, and the header of cut prompts, to SGLang's application, before it serves."""
    for method, path, handler in ROUTES:
        # One by one: of the routes of a router SGLang does not find out which key they need.
        app.add_api_route(path, handler, methods=[method])
    app.add_middleware(DroppedTokensHeader)


class UnpinBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of /hc/unpin."""

    session: SessionName
    cache_salt: str | None = None
    extra_key: str | None = None

    @property
    def namespace(self) -> str | None:
        """Of requests with the same salt and key. Raises ValueError for users."""
        return _client(self.cache_salt, self.extra_key)


class StateBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of DELETE /hc/state, /hc/prefetch and /hc/demote: a client, a session, and at most one
    of `input_ids` and `text`."""

    session: SessionName | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    input_ids: list[int] | None = None
    text: str | None = None

    @property
    def namespace(self) -> str | None:
        """As of an `UnpinBody`."""
        return _client(self.cache_salt, self.extra_key)

    @property
    def has_tokens(self) -> bool:
        return self.input_ids is not None or self.text is not None


class RetainBody(StateBody, kw_only=True, forbid_unknown_fields=True):
    """Body of /hc/retain."""

    ttl_s: RetainSeconds
    priority: Annotated[int, Meta(ge=1, le=MOST_PRIORITY)] = MOST_PRIORITY


class PinBody(UnpinBody, kw_only=True, forbid_unknown_fields=True):
    """Body of /hc/pin, with one of `input_ids` and `text`."""

    ttl_s: PinSeconds
    input_ids: list[int] | None = None
    text: str | None = None


def _client(salt: str | None, key: str | None) -> str | None:
    """The namespace of a client's requests. Empty is none, as in these. Raises ValueError for
    users."""
    return client_namespace(salt or None, key or None)


class _Refused(Exception):
    """The caller may not do this. The message is for users."""


def _is_admin(everybody: bool = False) -> bool:
    """Whether the caller, whose key was checked, is an administrator. everybody: others may call
    too, if the server has a key. Raises _Refused."""
    args = arguments.of(get_global_state().tokenizer_manager)
    key, admin_key = arguments.api_keys(args)
    config = config_of(args)
    if admin_key or (config is not None and config.open_routes):
        return True
    if not key:
        raise _Refused(
            "/hc/* is off on a server without keys: start it with --admin-api-key, or with "
            "--hc-open-routes to let everybody use it"
        )
    if not everybody:
        raise _Refused("this is for administrators: start the server with --admin-api-key")
    return False


Handler = Callable[[Request], Awaitable[JSONResponse]]


def _guarded(handler: Handler) -> Handler:
    """Errors as answers. The admin key is asked for where there is one, else the API key: by
    SGLang in front of all routes, and here once more, because it takes a route that it does not
    know for one without an administrator."""

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    @functools.wraps(handler)
    async def guarded(request: Request) -> JSONResponse:
        key, admin_key = arguments.api_keys(arguments.of(get_global_state().tokenizer_manager))
        decision = decide_request_auth(
            method=request.method,
            path=request.url.path,
            authorization_header=request.headers.get("Authorization"),
            api_key=key,
            admin_api_key=admin_key,
            auth_level=AuthLevel.ADMIN_OPTIONAL,
        )
        try:
            if not decision.allowed:
                return _error(_Refused("unauthorized"), decision.error_status_code)
            return await handler(request)
        except _Refused as error:
            return _error(error, 403)
        except ValueError as error:
            return _error(error, 400)

    return guarded


@_guarded
async def pin(request: Request) -> JSONResponse:
    """Pin what the tiers have of a token sequence."""
    admin = _is_admin(everybody=True)
    body = decode_json(await request.body(), PinBody, "the body")
    tokens, namespace = _tokens(body)
    fields = {"session": body.session, "namespace": namespace, "tokens": tokens}
    reply = await _ask("pin", {**fields, "ttl_s": body.ttl_s})
    return _shown(reply if admin else {"session": body.session, "ttl_s": body.ttl_s})


@_guarded
async def unpin(request: Request) -> JSONResponse:
    """End a session's pin."""
    admin = _is_admin(everybody=True)
    body = decode_json(await request.body(), UnpinBody, "the body")
    reply = await _ask("unpin", {"session": body.session, "namespace": body.namespace})
    return _shown(reply if admin else {"session": body.session})


@_guarded
async def pins(request: Request) -> JSONResponse:
    """The pins of one namespace."""
    _is_admin()
    salt, key = map(request.query_params.get, ("cache_salt", "extra_key"))
    return _shown(await _ask("list", {"namespace": _client(salt, key)}))


@_guarded
async def forget(request: Request) -> JSONResponse:
    """Forget a client, or a prefix of its, in every tier. Answered when that is durable."""
    _is_admin()
    body = decode_json(await request.body(), StateBody, "the body")
    what: dict[str, Any] = {"client": body.namespace, "tokens": []}
    if body.has_tokens:
        what["tokens"] = _token_ids(body)
    elif body.session is not None:
        what["session"] = body.session
    return _shown(joined_answers(await _ask_all(METHOD, what)))


def _about_state(action: str, kind: type[StateBody]) -> Handler:
    """What a session or tokens name is retained, fetched or demoted."""

    @_guarded
    async def handler(request: Request) -> JSONResponse:
        admin = _is_admin(everybody=True)
        body = decode_json(await request.body(), kind, "the body")
        tokens, namespace = _tokens(body) if body.has_tokens else (None, body.namespace)
        if tokens is None and body.session is None:
            raise ValueError("give a session, or token ids as input_ids or their text as text")
        what = {"session": body.session, "namespace": namespace, "tokens": tokens}
        shown = {} if body.session is None else {"session": body.session}
        if isinstance(body, RetainBody):
            what |= {"ttl_s": body.ttl_s, "priority": body.priority}
            shown |= {"ttl_s": body.ttl_s}
        reply = joined(await _ask_all(retaining.PREFIX + action, what))
        return _shown(reply if admin else shown)

    return handler


ROUTES = (
    ("POST", "/hc/pin", pin),
    ("POST", "/hc/unpin", unpin),
    ("POST", "/hc/retain", _about_state("retain", RetainBody)),
    ("POST", "/hc/prefetch", _about_state("prefetch", StateBody)),
    ("POST", "/hc/demote", _about_state("demote", StateBody)),
    ("GET", "/hc/pins", pins),
    ("DELETE", "/hc/state", forget),
)


async def _ask(method: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask about pins."""
    return joined(await _ask_all(PREFIX + method, body))


async def _ask_all(method: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Ask every scheduler (one per data-parallel rank)."""
    manager = get_global_state().tokenizer_manager
    results = await manager.dumper_control(DumperControlReqInput(method=method, body=body))
    return [reply for result in results for reply in result.response]


def _shown(reply: dict[str, Any]) -> JSONResponse:
    return JSONResponse(reply, reply.pop("status", 200))


def _error(error: Exception, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error)}}, status)


def _tokens(body: PinBody | StateBody) -> tuple[list[int], str | None]:
    """The tokens whose blocks are meant, and their namespace."""
    manager = get_global_state().tokenizer_manager
    tokens, namespace = cut_tokens(manager, _token_ids(body), body.namespace)
    most = manager.model_config.context_len
    if len(tokens) > most:
        raise ValueError(f"{len(tokens)} tokens; the model's context is {most}")
    return tokens, namespace


def _token_ids(body: PinBody | StateBody) -> list[int]:
    """The token ids that a body names."""
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
    return tokens
