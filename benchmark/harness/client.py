"""Asking one server: the three HTTP interfaces, streaming, with the times of every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from benchmark.harness.workload import Session, Turn
from sglang_hc.tools.cli.main import UsageError

_MAX_EVENT_BYTES = 64 << 20
"""One event of a long reply holds all its token ids; aiohttp's default line limit is 64 KiB."""


class RequestFailed(RuntimeError):
    """The server refused the request or broke the stream."""


@dataclass
class Reply:
    """What came back. Times are seconds after the request was sent.

    ids are empty when the interface does not tell them. hits: cached prompt tokens by tier
    (`device`, `host`, `storage`), or under `cached` when the tier is not told.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)


class History:
    """What one session has said so far, as the next prompt needs it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.ids = list(session.system_ids)
        self.messages: list[dict[str, str]] = []
        if session.system_text:
            self.messages.append({"role": "system", "content": session.system_text})

    @property
    def free_end(self) -> bool:
        """Whether a reply ends where the model ends it."""
        return self._session.end_id is not None

    def ask(self, turn: Turn) -> None:
        """Append the user's part of a turn."""
        self.ids = list(turn.ids) if turn.whole else self.ids + list(turn.ids)
        if turn.whole:
            self.messages = []
        self.messages.append({"role": "user", "content": turn.text})

    def answer(self, reply: Reply) -> None:
        """Append the reply: the exact ids that were generated."""
        self.ids += self._session.closed(reply.ids)
        self.messages.append({"role": "assistant", "content": reply.text})


class Api(Protocol):
    """One HTTP interface: how a request is written and how its events are read."""

    path: str
    needs_text: bool

    def body(self, history: History, output_len: int) -> dict[str, Any]:
        """JSON body of a streaming greedy request for `output_len` tokens.

        Exactly that many, or at most where the history says that replies end freely.
        """

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        """Update `reply` from one event. Returns how many new tokens came with it."""


class GenerateApi:
    """SGLang's own /generate, asked with token ids."""

    path = "/generate"
    needs_text = False

    def body(self, history: History, output_len: int) -> dict[str, Any]:
        sampling = {
            "temperature": 0,
            "max_new_tokens": output_len,
            "ignore_eos": not history.free_end,
        }
        return {"input_ids": history.ids, "sampling_params": sampling, "stream": True}

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        meta = event.get("meta_info") or {}
        ids = event.get("output_ids") or []
        done = int(meta.get("completion_tokens") or len(ids))
        # By default events repeat the reply so far; with --incremental-streaming-output
        # they hold only what is new.
        reply.ids = list(ids) if len(ids) == done else reply.ids + list(ids)
        reply.text = event.get("text") or reply.text
        new, reply.tokens = done - reply.tokens, done
        reply.prompt_tokens = int(meta.get("prompt_tokens") or reply.prompt_tokens)
        details = meta.get("cached_tokens_details")
        if details:
            reply.hits = {
                tier: int(count) for tier, count in details.items() if isinstance(count, int)
            }
        elif meta.get("cached_tokens"):
            reply.hits = {"cached": int(meta["cached_tokens"])}
        return new


class CompletionsApi:
    """OpenAI /v1/completions, asked with the whole conversation as one text."""

    path = "/v1/completions"
    needs_text = True

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, history: History, output_len: int) -> dict[str, Any]:
        prompt = "".join(message["content"] for message in history.messages)
        return {**_openai_body(self._model, output_len, history), "prompt": prompt}

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        choices = event.get("choices") or []
        new = sum(_add_text(reply, choice.get("text") or "") for choice in choices)
        _read_usage(event, reply)
        return new


class ChatApi:
    """OpenAI /v1/chat/completions, asked with messages."""

    path = "/v1/chat/completions"
    needs_text = True

    def __init__(self, model: str) -> None:
        self._model = model

    def body(self, history: History, output_len: int) -> dict[str, Any]:
        return {**_openai_body(self._model, output_len, history), "messages": history.messages}

    def read(self, event: dict[str, Any], reply: Reply) -> int:
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or []]
        new = sum(
            _add_text(reply, (delta.get("reasoning_content") or "") + (delta.get("content") or ""))
            for delta in deltas
        )
        _read_usage(event, reply)
        return new


def _openai_body(model: str, output_len: int, history: History) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": output_len,
        "temperature": 0,
        "ignore_eos": not history.free_end,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _add_text(reply: Reply, text: str) -> int:
    """Without token ids an event with text counts as one token; the usage corrects the total."""
    if not text:
        return 0
    reply.text += text
    reply.tokens += 1
    return 1


def _read_usage(event: dict[str, Any], reply: Reply) -> None:
    usage = event.get("usage")
    if not usage:
        return
    reply.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    reply.tokens = int(usage.get("completion_tokens") or reply.tokens)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached:
        reply.hits = {"cached": int(cached)}


APIS = ("generate", "completions", "chat")


def make_api(name: str, model: str) -> Api:
    """Interface by name; `model` is the name sent to OpenAI endpoints."""
    if name == "generate":
        return GenerateApi()
    if name == "completions":
        return CompletionsApi(model)
    if name == "chat":
        return ChatApi(model)
    raise UsageError(f"--api {name}: give one of {', '.join(APIS)}")


class Client:
    """A connection pool to one server. Use as an async context manager."""

    def __init__(self, url: str, api: Api, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._api = api
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._http = aiohttp.ClientSession(
            timeout=self._timeout,
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=_MAX_EVENT_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def ask(self, history: History, output_len: int) -> Reply:
        """One streaming request. Raises RequestFailed; a timeout is one."""
        assert self._http is not None
        reply = Reply()
        begun = last = time.perf_counter()
        try:
            body = self._api.body(history, output_len)
            async with self._http.post(self._url + self._api.path, json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise RequestFailed(f"HTTP {response.status}: {text}")
                async for event in _events(response.content):
                    now = time.perf_counter()
                    new = self._api.read(event, reply)
                    if new <= 0:
                        continue
                    if not reply.ttft_s:
                        reply.ttft_s = now - begun
                    else:
                        # Tokens that came in one event share its gap evenly.
                        reply.itl_s += [(now - last) / new] * new
                    last = now
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        reply.latency_s = last - begun
        if not reply.tokens:
            raise RequestFailed("the stream ended without a token")
        return reply

    async def flush_cache(self) -> bool:
        """Empty the server's cache. False when the server has no such route.

        Raises RequestFailed when the server has it but stays busy for 30 s.
        """
        assert self._http is not None
        for _ in range(60):
            async with self._http.post(f"{self._url}/flush_cache") as response:
                if response.status == 200:
                    return True
                if response.status in (404, 405):
                    return False
            await asyncio.sleep(0.5)
        raise RequestFailed("/flush_cache was refused for 30 s: the server is not idle")

    async def logprobs(self, ids: Sequence[int], candidates: Sequence[int]) -> dict[int, float]:
        """Natural-log probability of each candidate as the next token after `ids`.

        Needs /generate. Raises RequestFailed.
        """
        assert self._http is not None
        body = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "token_ids_logprob": list(candidates),
        }
        try:
            async with self._http.post(f"{self._url}/generate", json=body) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}: {await response.text()}")
                meta = (await response.json())["meta_info"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
        rows = [*meta["output_top_logprobs"][0], *meta["output_token_ids_logprobs"][0]]
        return {int(token): float(value) for value, token, *_ in rows}

    async def get_json(self, path: str) -> dict[str, Any]:
        """A GET route's JSON object; empty when the server does not have it."""
        assert self._http is not None
        try:
            async with self._http.get(self._url + path) as response:
                if response.status != 200:
                    return {}
                value = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream. Raises RequestFailed on an error event."""
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise RequestFailed(f"unexpected event {data[:200]!r}")
        if "error" in event:
            raise RequestFailed(f"error event: {event['error']}")
        yield event
