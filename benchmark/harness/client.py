"""Asking one server by SGLang's /generate, streaming, with the times of every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmark.harness.workload import History

_MAX_EVENT_BYTES = 64 << 20
"""One event of a long reply holds all its token ids; aiohttp's default line limit is 64 KiB."""


class RequestFailed(RuntimeError):
    """The server refused the request or broke the stream."""


@dataclass
class Reply:
    """What came back. Times are seconds after the request was sent.

    hits: cached prompt tokens by tier (`device`, `host`, `storage`), or under `cached` when the
    tier is not told.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    hits: dict[str, int] = field(default_factory=dict)
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)


def _body(history: History, output_len: int) -> dict[str, Any]:
    """A streaming greedy request for `output_len` tokens: exactly that many, or at most where the
    history says that replies end freely."""
    sampling = {
        "temperature": 0,
        "max_new_tokens": output_len,
        "ignore_eos": not history.free_end,
    }
    return {"input_ids": history.ids, "sampling_params": sampling, "stream": True}


def _read(event: dict[str, Any], reply: Reply) -> int:
    """Update `reply` from one event. Returns how many new tokens came with it."""
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
        reply.hits = {tier: int(count) for tier, count in details.items() if isinstance(count, int)}
    elif meta.get("cached_tokens"):
        reply.hits = {"cached": int(meta["cached_tokens"])}
    return new


class Client:
    """A connection pool to one server. Use as an async context manager."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url.rstrip("/")
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

    async def ask(self, history: History, output_len: int, reply: Reply | None = None) -> Reply:
        """One streaming request. Raises RequestFailed; a timeout is one. reply: is filled as it
        comes; who gives up has what came."""
        assert self._http is not None
        reply = Reply() if reply is None else reply
        begun = last = time.perf_counter()
        try:
            body = _body(history, output_len)
            async with self._http.post(f"{self._url}/generate", json=body) as response:
                if response.status != 200:
                    text = (await response.text())[:300]
                    raise RequestFailed(f"HTTP {response.status}: {text}")
                async for event in _events(response.content):
                    now = time.perf_counter()
                    new = _read(event, reply)
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

        Raises RequestFailed.
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
