"""A small streaming server with SGLang's /generate, which remembers what it was asked.

Its tokens are a pure function of the prompt, so equal servers agree; `disagree_after` makes one
that answers something else from that prompt length on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 1000


def next_token(ids: list[int]) -> int:
    """Greedy token of the fake model."""
    return (sum(i * value for i, value in enumerate(ids, 1)) * 31 + 7) % VOCABULARY


@dataclass
class FakeServer:
    """Settings and memory of one fake server."""

    url: str = ""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    seen: list[tuple[int, ...]] = field(default_factory=list)
    disagree_after: int | None = None
    margin: float = 0.5
    incremental: bool = False
    can_flush: bool = True
    host_tier: bool = True
    status: int = 200
    break_stream: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def paths(self, path: str) -> list[dict[str, Any]]:
        """Bodies of the requests to one path."""
        return [body for name, body in self.asked if name == path]

    def reply_ids(self, prompt: list[int], count: int) -> list[int]:
        ids = list(prompt)
        for _ in range(count):
            token = next_token(ids)
            if self.disagree_after is not None and len(ids) >= self.disagree_after:
                token = (token + 1) % VOCABULARY
            ids.append(token)
        return ids[len(prompt) :]

    def cached(self, prompt: list[int]) -> int:
        """Longest prefix that was seen; the prompt is seen from now on."""
        with self.lock:
            best = 0
            for old in self.seen:
                same = 0
                for a, b in zip(old, prompt[:-1], strict=False):
                    if a != b:
                        break
                    same += 1
                best = max(best, same)
            return best


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        known = {
            "/health": {},
            "/get_model_info": {"model_path": "fake-model"},
            "/v1/models": {"data": [{"id": "fake-model"}]},
            "/server_info": {"dtype": "float32", "max_total_num_tokens": 60},
        }
        self._json(200 if self.path in known else 404, known.get(self.path, {}))

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        with self.fake.lock:
            self.fake.asked.append((self.path, body))
        if self.path == "/flush_cache":
            self.fake.seen.clear()
            self._json(200 if self.fake.can_flush else 404, {})
        elif self.fake.status != 200:
            self._json(self.fake.status, {"error": {"message": "refused by the fake"}})
        elif self.path == "/generate":
            self._generate(body)
        else:
            self._json(404, {})

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, events: list[Any]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the client has given up
            for event in events:
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                self.wfile.flush()
                if self.fake.break_stream:
                    return
            self.wfile.write(b"data: [DONE]\n\n")

    def _generate(self, body: dict[str, Any]) -> None:
        prompt = body["input_ids"]
        if not body.get("stream"):
            self._json(200, {"meta_info": self._logprobs(body)})
            return
        cached = self.fake.cached(prompt)
        reply = self.fake.reply_ids(prompt, body["sampling_params"]["max_new_tokens"])
        on_host = cached // 2 if self.fake.host_tier else 0
        details = {"device": cached - on_host, "host": on_host} if cached else None
        events = []
        for done in range(1, len(reply) + 1):
            meta = {
                "prompt_tokens": len(prompt),
                "completion_tokens": done,
                "cached_tokens": cached,
                "cached_tokens_details": details,
            }
            ids = reply[done - 1 : done] if self.fake.incremental else reply[:done]
            events.append({"text": "x" * done, "output_ids": ids, "meta_info": meta})
        if self.fake.break_stream:
            events = [{"error": {"message": "the fake broke"}}]
        with self.fake.lock:
            self.fake.seen.append(tuple([*prompt, *reply]))
        self._stream(events)

    def _logprobs(self, body: dict[str, Any]) -> dict[str, Any]:
        best = next_token(body["input_ids"])
        rows = [[0.0 if t == best else -self.fake.margin, t] for t in body["token_ids_logprob"]]
        return {"output_top_logprobs": [[[0.0, best]]], "output_token_ids_logprobs": [rows]}


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # with five, who comes then has to try again after a second


def serve(fake: FakeServer, port: int = 0) -> ThreadingHTTPServer:
    """A server on 127.0.0.1 that answers as `fake`; not yet serving."""
    handler = type("Handler", (_Handler,), {"fake": fake})
    server = _Server(("127.0.0.1", port), handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    return server


def main() -> None:
    """Serve with the command line of a launcher; flags of no interest are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--fake-disagree-after", type=int)
    parser.add_argument("--fake-margin", type=float, default=0.5)
    parser.add_argument("--fake-no-host-tier", dest="host_tier", action="store_false")
    args, others = parser.parse_known_args()
    print("fake flags:", *others, flush=True)
    if "--fake-die" in others:
        sys.exit("the fake refuses to start")
    fake = FakeServer(
        disagree_after=args.fake_disagree_after, margin=args.fake_margin, host_tier=args.host_tier
    )
    serve(fake, args.port).serve_forever()


if __name__ == "__main__":
    main()
