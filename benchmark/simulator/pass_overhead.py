"""What the queue's policies cost one scheduler pass at 1,000 waiting requests.

    python -m benchmark.simulator.pass_overhead

Each pass admits one request and sees one new one: look-ahead over the whole queue, admission order,
and the blocks (32 per request) of the two requests that changed. Goal: under 200 us.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path

from sglang_hc.policy.eviction import QueuePolicy
from sglang_hc.queue.admission import Admission
from sglang_hc.queue.windows import LookAhead
from sglang_hc.tools.simulator.disk import SimulatedDisk

WAITING, BLOCKS, PASSES = 1000, 32, 2000


def blocks_of(request: str) -> list[bytes]:
    return [f"{request}/{index}".encode() for index in range(BLOCKS)]


def main() -> None:
    window: LookAhead[str] = LookAhead()
    tier = SimulatedDisk(WAITING * BLOCKS, QueuePolicy(window))
    needs = {f"r{number}": blocks_of(f"r{number}") for number in range(WAITING + PASSES)}
    queue = [f"r{number}" for number in range(WAITING)]
    for request in queue:
        parent = None
        for block in needs[request]:
            tier.write(parent, block, 0.0)
            parent = block
    admission: Admission[str] = Admission(window.requests, bound=32)
    window.update(queue, WAITING, needs.__getitem__)
    seconds = []
    for number in range(PASSES):
        queue.append(f"r{WAITING + number}")
        start = time.perf_counter()
        window.update(queue, WAITING, needs.__getitem__)
        admission.is_due(queue[0])
        chosen = queue[:1]
        admission.count(queue, chosen)
        seconds.append(time.perf_counter() - start)
        queue.remove(chosen[0])
    seconds.sort()
    result = {
        "command": "python -m benchmark.simulator.pass_overhead",
        "waiting": WAITING,
        "blocks_per_request": BLOCKS,
        "median_us": 1e6 * seconds[len(seconds) // 2],
        "p99_us": 1e6 * seconds[int(0.99 * len(seconds))],
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result, indent=1))
    path = Path(__file__).parents[1] / "results" / "simulator-pass-overhead.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
