"""A program like a user's: an `sglang.Engine` with the tiers, that is handed every hostile value.

    python -m support.hostile_engine MODEL

By `Engine.generate`, by the request object where that has a field more, and by what the native gRPC
server calls (`RuntimeHandle`). It prints one JSON object: what a prompt that left the device and
prompts that were cut show; what is wrong, a line for each value; how many were refused and served;
what the tiers counted.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import sglang
from sglang.srt.entrypoints.grpc_bridge import RuntimeHandle
from sglang.srt.managers.io_struct import GenerateReqInput

from support.hostile import HOSTILE, Hostile
from support.prompts import prompt

PROMPT = list(range(5, 85))
SAMPLING = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
NAMES = {"extra_key", "cache_salt", "custom_params", "session_id", "rid"}
"""Fields that say nothing about which tokens are right."""

Entrance = Callable[[dict[str, Any]], Any]


def body_of(hostile: Hostile | None) -> dict[str, Any]:
    sampling = dict(SAMPLING)
    body = {"input_ids": list(PROMPT), "return_logprob": True, "sampling_params": sampling}
    if hostile is not None:
        (sampling if hostile.sampling else body)[hostile.field] = hostile.value
    return body


def entrances(engine: sglang.Engine) -> dict[str, Entrance]:
    """Each returns the reply, or raises."""
    run = engine.loop.run_until_complete
    known = inspect.signature(engine.generate).parameters

    def by_generate(body: dict[str, Any]) -> Any:
        if set(body) <= set(known):
            return engine.generate(**body)
        return run(anext(engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None)))

    async def made() -> RuntimeHandle:
        """In the engine's loop, where the tokenizer then reads its replies."""
        return RuntimeHandle(engine.tokenizer_manager, engine.template_manager, engine.server_args)

    bridge = run(made())

    def by_grpc(body: dict[str, Any]) -> Any:
        told: asyncio.Future[Any] = engine.loop.create_future()

        def tell(reply: Any, finished: bool = False, error: str | None = None) -> None:
            if not told.done():
                told.set_result(reply if error is None else ValueError(error))

        bridge.submit_request(req_type="generate", req_dict=body, chunk_callback=tell)
        found = run(told)
        if isinstance(found, Exception):
            raise found
        return found

    return {"Engine.generate": by_generate, "gRPC": by_grpc}


def show_tiers(engine: sglang.Engine) -> dict[str, Any]:
    """Both replies to a prompt that left the device in between, where the second one's state was,
    and what is left out of a batch of two long prompts, which are the same list."""

    def ask(ids: Any) -> Any:
        return engine.generate(input_ids=ids, sampling_params={**SAMPLING, "max_new_tokens": 8})

    first = ask(prompt(1, 200))
    for seed in range(2, 6):
        ask(prompt(seed, 320))
    again, history = ask(prompt(1, 200)), prompt(6, 700)
    cuts = [reply["meta_info"]["hc_overflow"]["dropped"] for reply in ask([history, history])]
    return {
        "replies": [first["output_ids"], again["output_ids"]],
        "found": again["meta_info"]["cached_tokens_details"],
        "cuts": cuts,
        "history": len(history),
    }


def try_all(name: str, ask: Entrance, wanted: list[int], counted: Counter[str]) -> list[str]:
    """What is wrong."""
    wrong = []
    for hostile in HOSTILE:
        body = body_of(hostile)
        if not set(body) <= set(GenerateReqInput.__dataclass_fields__):
            continue
        print(name, hostile.name, file=sys.stderr, flush=True)  # the last one, if it hangs
        try:
            reply = ask(body)
        except ValueError as error:
            counted[f"{name} refused"] += 1
            if not str(error) or len(str(error)) > 1000:
                wrong.append(f"{name} {hostile.name}: refused with {str(error)[:100]!r}")
        except Exception as error:
            wrong.append(f"{name} {hostile.name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            counted[f"{name} served"] += 1
            if hostile.field in NAMES and reply["output_ids"] != wanted:
                wrong.append(f"{name} {hostile.name}: other tokens")
        if ask(body_of(None))["output_ids"] != wanted:
            wrong.append(f"{name} {hostile.name}: other tokens for the next request")
    return wrong


def main() -> None:
    engine = sglang.Engine(
        model_path=sys.argv[1], dtype="float32", max_total_tokens=640, skip_server_warmup=True,
        log_level="error", enable_priority_scheduling=True,
    )  # fmt: skip
    counted: Counter[str] = Counter()
    wrong: list[str] = []
    found = show_tiers(engine)
    for name, ask in entrances(engine).items():
        wrong += try_all(name, ask, ask(body_of(None))["output_ids"], counted)
    numbers = engine.get_server_info()["internal_states"][0]["hc"]
    print("RESULT", json.dumps(found | {"wrong": wrong, "counted": counted, "numbers": numbers}))
    engine.shutdown()


if __name__ == "__main__":
    main()
